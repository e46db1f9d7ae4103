"""Levels around a threshold, to which it may move from one step to the next.

Each rank counts how many of its values pass each level. Where the counts of all ranks are known, so
is the level that brings about as many values as are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.magnitude import key_magnitude, magnitude_keys, threshold_key

BIN_BITS = 12
"""Magnitude keys are counted in bins of 2**12, or 0.05 % of the magnitude."""
MOVES = (1.2 ** torch.arange(40)).round().long().unique()
LEVEL_BINS = torch.cat([-MOVES.flip(0), torch.zeros(1, dtype=torch.int64), MOVES])
"""Where a threshold may move from one step to the next, in bins, ascending: by up to 60 %, and
finely where it moves little, since error feedback crowds entries just above the threshold."""
LEVELS = LEVEL_BINS.numel()
FIRST, LAST = int(LEVEL_BINS[0]), int(LEVEL_BINS[-1])


def counts_at_levels(values: Tensor, threshold: float) -> Tensor:
    """How many values pass each level.

    Args:
        values: float32 `(nnz,)`.
        threshold: What the levels lie around.

    Returns:
        int32 `(LEVELS,)`, descending; zeros where there are no levels: magnitudes next to zero have
        no room for any below them.
    """
    lowest = _lowest_key(threshold)
    if lowest <= 0:
        return torch.zeros(LEVELS, dtype=torch.int32)
    bins = (magnitude_keys(values) - lowest) >> BIN_BITS
    counts = torch.bincount(bins.clamp_(-1, LAST - FIRST) + 1, minlength=LAST - FIRST + 2)
    return counts.flip(0).cumsum(0).flip(0)[LEVEL_BINS - FIRST + 1].int()


def threshold_at(threshold: float, level: int) -> float:
    """The threshold of a level around another one, in `[0, LEVELS)`."""
    return key_magnitude(_lowest_key(threshold) + (int(LEVEL_BINS[level] - FIRST) << BIN_BITS))


def _lowest_key(threshold: float) -> int:
    return threshold_key(threshold) + (FIRST << BIN_BITS)
