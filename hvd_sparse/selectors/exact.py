"""Exact top-k: the k largest magnitudes of the accumulator, in about one pass.

The pass takes what reaches a pivot, and puts back what is too much. The pivot comes from a sample
in every step: with small batches the k-th magnitude moves by a third from step to step, so that a
guess at it from the last step misses, which costs another pass.
"""

from __future__ import annotations

import math
from typing import ClassVar

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.selector import Selector, own_k
from hvd_sparse.streams import SparseStream


class ExactTopK(Selector):
    """The `k` entries of the largest magnitude, ties to the lower index.

    `threshold` is the k-th magnitude of the last step; 0.0 before the first.
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
        stream, threshold = accumulator.topk(wanted)
        if math.isfinite(threshold):
            self.threshold = threshold
        return stream
