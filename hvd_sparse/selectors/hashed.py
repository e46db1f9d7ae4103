"""DRAGONN's extraction: each passing entry goes to the slot that its index is hashed to.

Source: Wang et al., "DRAGONN: Distributed Randomized Approximate Gradients of Neural Networks"
(ICML 2022), algorithm 1 and appendix A.2 (hash collisions).

Symbols: l entries that may be expected to pass the threshold, at most; m slots, h a hash function,
I the table of slots.

Steps:
  1. for every entry i that passes: I[h(i)] = i, in any order and without waiting for others;
  2. what stands in a slot is taken. The others have lost their slot; they stay in the residual and
     compete again in the next step, under another h, so that no pair collides for ever.

The sparse decode of section 4.3 (concatenate P streams, then one scatter-add) is `merge_sum`.

Departures:
  * The largest magnitudes win, whatever the order in which entries come: no part of the tensor is
    favoured, and what loses is small.
  * With `slots_per_bucket` 8 an entry takes any free slot of its bucket. At m = 3l under 0.1 % of
    what passes loses its slot, and at most 0.8 % in a step of many different magnitudes, whatever
    the pattern of the indices (tests/selectors/test_dragonn.py); with the paper's single slot,
    11.5 % at m = 4l. The hash is a mixer of two rounds: a single product maps indices at equal
    distances to clumps.
  * m is a multiple of l, not of k. A threshold from a sample lets up to twice k pass, or four times
    where the sample is small and rows differ. l is three standard deviations above that.
"""

from __future__ import annotations

import math

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.selector import mixed
from hvd_sparse.selectors.thresholded import Extraction
from hvd_sparse.streams import SparseStream

SLOTS_PER_BUCKET = (1, 8)


class HashedExtraction(Extraction):
    """Takes what wins a slot, of m/l `slots_per_entry` in buckets of 1, as in the paper, or 8."""

    kept = ("step",)

    def __init__(self, slots_per_entry: float = 3.0, slots_per_bucket: int = 8) -> None:
        self.slots_per_entry = slots_per_entry
        self.slots_per_bucket = slots_per_bucket
        self.step = 0

    @override
    def extract(self, accumulator: Accumulator, threshold: float, expected: float) -> SparseStream:
        buckets = math.ceil(self.slots_per_entry * expected / self.slots_per_bucket)
        seed = mixed(0, self.step)
        self.step += 1
        return accumulator.hash_select(
            threshold, buckets * self.slots_per_bucket, self.slots_per_bucket, seed
        )
