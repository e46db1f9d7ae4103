"""Ok-Topk's local selection: an exact threshold, reused until it is old or has drifted.

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP '22),
section 3.1.3 and Algorithm 1, lines 2-4.

Departures: the paper reuses a threshold for τ′ steps whatever it selects. Here a selection outside
`k (1 ± tolerance)` is put right in the same step, and the threshold with it, so that nnz stays
within the tolerance while residuals grow or the gradient's scale jumps. And a threshold that has
just moved is not reused: one that is too high costs a second pass, an exact one a fifth of a pass.
"""

from __future__ import annotations

import math

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.correction import keep_largest, take_more
from hvd_sparse.selectors.exact import ExactTopK
from hvd_sparse.selectors.selector import own_k
from hvd_sparse.selectors.thresholded import TOLERANCE
from hvd_sparse.streams import SparseStream

STEADY = 0.02
"""Change of a threshold, as a share of it, up to which the next step reuses it: where magnitudes
fall off as in most gradients, it changes the number of entries by about the tolerance."""


class ReusedThreshold(ExactTopK):
    """Selects by a threshold that is evaluated exactly every `interval` steps.

    Attributes:
        interval: τ′, steps from one exact threshold to the next, at least 1.
        tolerance: How far nnz may be from k, as a share of k, before the threshold is put right.
        step: Steps since the threshold last moved; at multiples of τ′ it is evaluated.
        threshold: `local_threshold`, the magnitude from which entries are selected.
    """

    kept = ("step", "threshold")

    def __init__(self, interval: int = 32, tolerance: float = TOLERANCE) -> None:
        super().__init__()
        self.interval = interval
        self.tolerance = tolerance
        self.step = 0

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """The number of entries is within `k (1 ± tolerance)`, nonzeros permitting."""
        wanted = own_k(accumulator, k)
        everything = wanted == accumulator.width  # no threshold may leave anything behind then
        due = everything or self.step % self.interval == 0 or self.threshold == 0.0
        last = self.threshold
        if due or wanted == 0:
            stream = super().select(accumulator, k)
        else:
            stream = self._reuse(accumulator, wanted)
        self.step = self.step + 1 if abs(self.threshold - last) <= STEADY * last else 0
        return stream

    def _reuse(self, accumulator: Accumulator, wanted: int) -> SparseStream:
        stream, threshold = accumulator.select(self.threshold), self.threshold
        if stream.nnz > wanted * (1 + self.tolerance):
            stream, threshold = keep_largest(accumulator, stream, wanted)
        elif stream.nnz < wanted * (1 - self.tolerance) and stream.isfinite():
            stream, threshold = take_more(accumulator, stream, wanted)
        if math.isfinite(threshold):
            self.threshold = threshold
        return stream
