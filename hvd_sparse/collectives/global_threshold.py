"""Ok-Topk's global threshold: found exactly, and followed from step to step by counts at levels.

`th_re_evaluate` finds the k-th largest magnitude of values that are spread over the ranks. Around
it lie levels: each rank counts how many of its values pass each of them. Once the counts of all
ranks are known, so is about where as many values pass as are wanted.

Source: Ok-Topk (Li and Hoefler, PPoPP '22), Algorithm 1, lines 10-11, gathers all reduced values
everywhere and sorts them. Departure: a radix descent over magnitude keys finds the same threshold
from four sums of 256 counters, so its volume does not depend on k or on fill-in.

Cost of `th_re_evaluate`: 4 (log P) α + 4 · 512 (log P) β at most, in words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.magnitude import INFINITE_KEY, key_magnitude, magnitude_keys, threshold_key
from hvd_sparse.streams import CPU
from hvd_sparse.transports import Transport

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
BIN_BITS = 12
"""Magnitude keys are counted in bins of 2**12, or 0.05 % of the magnitude."""
MOVES = (1.2 ** torch.arange(40, dtype=torch.int64, device="cpu")).round().long().unique()
LEVEL_BINS = torch.cat([-MOVES.flip(0), torch.zeros(1, dtype=torch.int64, device="cpu"), MOVES])
"""Where a threshold may move from one step to the next, in bins, ascending: by up to 60 %, and
finely where it moves little, since error feedback crowds entries just above the threshold."""
LEVELS = LEVEL_BINS.numel()
FIRST, LAST = int(LEVEL_BINS[0]), int(LEVEL_BINS[-1])
_ABOVE_FIRST = (LEVEL_BINS - FIRST).numpy()


def th_re_evaluate(values: Tensor, k: int, transport: Transport) -> float:
    """The k-th largest finite magnitude of all ranks' values; 0.0 where there are fewer than k.

    All ranks call this together and get the same. `values` is this rank's share, float32 `(nnz,)`;
    k is at least 1.
    """
    keys = magnitude_keys(values)
    keys = keys[(keys > 0) & (keys < INFINITE_KEY)]
    prefix, wanted = 0, k
    for shift in (24, 16, 8, 0):
        counts = torch.bincount((keys >> shift) & (DIGITS - 1), minlength=DIGITS)
        (counts,) = ops.moved((counts,), CPU)
        counts = transport.allreduce_sum(counts, channel="global_threshold")
        from_top = counts.flip(0).cumsum(0)
        if int(from_top[-1]) < wanted:
            return 0.0
        place = int(torch.searchsorted(from_top, wanted))
        digit = DIGITS - 1 - place
        wanted -= int(from_top[place] - counts[digit])
        prefix = (prefix << DIGIT_BITS) | digit
        keys = keys[(keys >> shift) == prefix]
    return key_magnitude(prefix)


def counts_at_levels(values: Tensor, threshold: float) -> Tensor:
    """How many values, float32 `(nnz,)` on the host, pass each of the levels around a threshold.

    Returns int32 `(LEVELS,)`, descending. All but zeros pass levels below the least magnitude.
    """
    lowest = threshold_key(threshold) + (FIRST << BIN_BITS)
    # By NumPy: on few values each call costs a fraction of torch's.
    keys = np.minimum(values.numpy().view(np.int32) & 0x7FFFFFFF, INFINITE_KEY)
    if lowest <= 0:
        keys = keys[keys > 0]
    bins = (keys - lowest) >> BIN_BITS
    counts = np.bincount(np.clip(bins, -1, LAST - FIRST) + 1, minlength=LAST - FIRST + 2)
    passing = counts[::-1].cumsum()[::-1][_ABOVE_FIRST + 1]
    return torch.from_numpy(passing.astype(np.int32))


def threshold_passed_by(wanted: float, counts: Any, threshold: float) -> tuple[float, float]:
    """A threshold near another one that about `wanted` values pass, and how many are expected to.

    `counts`, an array, says how many pass each of the levels around `threshold`, descending.
    Between two levels values are taken to lie evenly.
    """
    keys = level_keys(threshold)
    key = max(0, int(np.interp(-wanted, -counts, keys)))
    return key_magnitude(key), float(np.interp(key, keys, counts))


def count_that_passes(other: float, counts: Any, threshold: float) -> float:
    """How many values pass another threshold; 0 where it lies beyond the levels of `counts`."""
    return float(np.interp(threshold_key(other), level_keys(threshold), counts, left=0, right=0))


def level_keys(threshold: float) -> Any:
    """The keys of the levels around a threshold, int64 `(LEVELS,)`; up to 0, all values pass."""
    return threshold_key(threshold) + (LEVEL_BINS.numpy() << BIN_BITS)
