"""Selection by a threshold: how it is estimated × how entries are extracted.

What was extracted is put right in the same step where it is not within the tolerance of k, so that
an estimate that is off costs time and never density.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import ceil
from typing import Any

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.correction import keep_largest, take_more
from hvd_sparse.selectors.selector import Selector, Stateful, own_k
from hvd_sparse.streams import SparseStream

TOLERANCE = 0.1
"""How far nnz may be from k, as a share of k."""


class Estimator(Stateful, ABC):
    """Estimates the k-th largest magnitude of an accumulator, before anything is taken."""

    @abstractmethod
    def estimate(self, accumulator: Accumulator, k: int) -> tuple[float, float]:
        """A threshold, at least 0, that about `k` of all the accumulator's entries reach.

        Returns also how many may be expected to reach it, at most.
        """


class Extraction(Stateful):
    """Ordered compaction: everything that reaches the threshold is taken."""

    def extract(self, accumulator: Accumulator, threshold: float, expected: float) -> SparseStream:
        """Take what reaches the threshold; at most about `expected` entries are to be expected."""
        del expected
        return accumulator.select(threshold)


class ThresholdSelector(Selector):
    """Any estimator with any extraction.

    Args:
        estimator: Gives each step's threshold.
        extraction: Takes what reaches it; None: ordered compaction.
        tolerance: How far nnz may be from k, as a share of k, before the selection is put right;
            infinite: it stays as it is.
        least_share: Share of k that is taken in any case, nonzeros permitting; None: what the
            tolerance says.

    Attributes:
        threshold: Magnitude from which entries left in the last step; 0.0 where all of them did.
    """

    def __init__(
        self,
        estimator: Estimator,
        extraction: Extraction | None = None,
        tolerance: float = TOLERANCE,
        least_share: float | None = None,
    ) -> None:
        self.estimator = estimator
        self.extraction = Extraction() if extraction is None else extraction
        self.tolerance = tolerance
        self.least_share = least_share
        self.threshold = 0.0

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """The number of entries is within `k (1 ± tolerance)`, nonzeros permitting."""
        wanted = own_k(accumulator, k)
        if wanted == 0:
            return accumulator.accumulate()
        self.threshold = 0.0
        if wanted == accumulator.width:
            return accumulator.select(0.0)  # density 1: no threshold may leave anything behind
        threshold, expected = self.estimator.estimate(accumulator, k)
        expected = max(wanted, accumulator.scope.share * expected)
        stream = self.extraction.extract(accumulator, threshold, expected)
        if stream.nnz > wanted * (1 + self.tolerance):
            stream, threshold = keep_largest(accumulator, stream, wanted)
        elif stream.nnz < wanted * (1 - self.tolerance) and stream.isfinite():
            stream, threshold = take_more(accumulator, stream, wanted)
        elif self.least_share and stream.nnz < self.least_share * wanted and stream.isfinite():
            stream, threshold = take_more(accumulator, stream, ceil(self.least_share * wanted))
        self.threshold = threshold
        return stream

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "estimator": self.estimator.state_dict(),
            "extraction": self.extraction.state_dict(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.estimator.load_state_dict(state["estimator"])
        self.extraction.load_state_dict(state["extraction"])
