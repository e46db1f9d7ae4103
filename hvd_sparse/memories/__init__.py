"""Memories: how gradients enter the accumulator, and what stays there."""

from hvd_sparse.memories.error_feedback import ErrorFeedback, Fading
from hvd_sparse.memories.global_momentum import GlobalMomentum
from hvd_sparse.memories.momentum_correction import MomentumCorrection
from hvd_sparse.memories.options import MOMENTUM_KINDS, MemoryOptions

__all__ = [
    "MOMENTUM_KINDS",
    "ErrorFeedback",
    "Fading",
    "GlobalMomentum",
    "MemoryOptions",
    "MomentumCorrection",
]
