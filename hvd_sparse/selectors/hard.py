"""Hard threshold: one magnitude for the whole training.

Source: Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization" (NeurIPS
2021). The threshold λ bounds what stays behind by λ² per element; density is whatever it is.
"""

from __future__ import annotations

import math

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.selector import Selector
from hvd_sparse.streams import SparseStream


class HardThreshold(Selector):
    """Everything that reaches λ, in units of the gradients (those of the scaled loss)."""

    tolerance = math.inf

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """`k` is not used, except that density 1 (k = n) takes everything."""
        if accumulator.width == 0 or accumulator.scope.share == 0.0:
            return accumulator.accumulate()
        if k == accumulator.numel:
            return accumulator.select(0.0)
        return accumulator.select(self.threshold)
