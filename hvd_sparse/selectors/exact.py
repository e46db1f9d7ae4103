"""Exact top-k: the k largest magnitudes of the accumulator, in about one pass."""

from __future__ import annotations

import math
from typing import ClassVar

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.selector import Selector, own_k
from hvd_sparse.streams import SparseStream

PIVOT_MARGIN = 0.9
"""The pivot of a step, as a share of the last step's threshold: low enough that it seldom misses
the k-th magnitude, high enough that few more than k entries pass it."""


class ExactTopK(Selector):
    """The `k` entries of the largest magnitude, ties to the lower index.

    Attributes:
        threshold: The k-th magnitude of the last step; 0.0 before the first.
    """

    kept: ClassVar[tuple[str, ...]] = ("threshold",)

    def __init__(self) -> None:
        self.threshold = 0.0

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """Takes `min(k, nonzeros)` entries."""
        wanted = own_k(accumulator, k)
        if wanted == 0:
            return accumulator.accumulate()
        stream, threshold = accumulator.topk(wanted, pivot=PIVOT_MARGIN * self.threshold)
        if math.isfinite(threshold):
            self.threshold = threshold
        return stream
