"""Memories: how gradients enter the accumulator, and what stays there."""

from hvd_sparse.memories.error_feedback import ErrorFeedback, Fading
from hvd_sparse.memories.global_momentum import GlobalMomentum
from hvd_sparse.memories.memory_options import MOMENTUM_KINDS, MemoryOptions
from hvd_sparse.memories.momentum_correction import MomentumCorrection

__all__ = [
    "MOMENTUM_KINDS",
    "ErrorFeedback",
    "Fading",
    "GlobalMomentum",
    "MemoryOptions",
    "MomentumCorrection",
]
