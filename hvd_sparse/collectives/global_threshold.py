"""The exact k-th largest magnitude of values that are spread over the ranks.

Source: Ok-Topk (Li and Hoefler, PPoPP '22), Algorithm 1, lines 10-11, gathers all reduced values
everywhere and sorts them. Departure: a radix descent over magnitude keys finds the same threshold
from four sums of 256 counters, so its volume does not depend on k or on fill-in.

Cost: 4 (log P) α + 4 · 512 (log P) β at most, in words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.magnitude import INFINITE_KEY, key_magnitude, magnitude_keys
from hvd_sparse.transports import Transport

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS


def th_re_evaluate(values: Tensor, k: int, transport: Transport) -> float:
    """Evaluate `global_threshold` exactly.

    Args:
        values: float32 `(nnz,)`, this rank's share; non-finite ones are not ranked.
        k: Rank of the magnitude sought among all ranks' values, at least 1.
        transport: All ranks call this together.

    Returns:
        The k-th largest finite magnitude, or 0.0 where there are fewer than k; equal on all ranks.
    """
    keys = magnitude_keys(values)
    keys = keys[(keys > 0) & (keys < INFINITE_KEY)]
    prefix, wanted = 0, k
    for shift in (24, 16, 8, 0):
        counts = torch.bincount((keys >> shift) & (DIGITS - 1), minlength=DIGITS)
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
