"""ExDyna's selection: by a threshold that the ranks scale together, in this rank's partition.

Source: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed
Deep Learning" (CCGrid 2024), algorithm 4.

Departures:
  * The first threshold comes from a sample of this rank's accumulator. The paper's is a guess that
    does not look at the gradients, and can be off by orders of magnitude.
  * What is taken are candidates, from somewhat below the threshold on: the exchange scales the
    threshold by their counts (collectives/exdyna.py) and returns what does not reach the new one.
"""

from __future__ import annotations

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.sampled import SampledThreshold
from hvd_sparse.selectors.selector import Selector
from hvd_sparse.streams import SparseStream

CANDIDATE_MARGIN = 0.9
"""Of the ranks' threshold: the least of the levels to which it may be scaled."""


class OnlineThreshold(SampledThreshold, Selector):
    """Candidates: everything in the scope that reaches 0.9 of the ranks' threshold."""

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """Takes as many as reach the threshold, not a part of k."""
        if accumulator.width == 0 or k == 0:
            return accumulator.accumulate()
        if k == accumulator.numel:
            return accumulator.select(0.0)  # density 1: no threshold may leave anything behind
        threshold = accumulator.scope.threshold or self.estimate(accumulator, k)[0]
        return accumulator.select(CANDIDATE_MARGIN * threshold)
