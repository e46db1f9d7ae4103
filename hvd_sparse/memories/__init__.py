"""Memories: how gradients enter the accumulator, and what stays there."""

from hvd_sparse.memories.clipping import Clipping
from hvd_sparse.memories.error_feedback import ErrorFeedback
from hvd_sparse.memories.momentum_correction import MomentumCorrection
from hvd_sparse.memories.options import MemoryOptions

__all__ = ["Clipping", "ErrorFeedback", "MemoryOptions", "MomentumCorrection"]
