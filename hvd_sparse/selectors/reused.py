"""Ok-Topk's local selection: an exact threshold, reused until it is old or has drifted.

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP '22),
section 3.1.3 and Algorithm 1, lines 2-4.

Departure: the paper reuses a threshold for τ′ steps whatever it selects. Here a selection outside
`k (1 ± tolerance)` is put right in the same step, and the threshold with it, so that nnz stays
within the tolerance while residuals grow or the gradient's scale jumps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.selectors.base import Selector
from hvd_sparse.selectors.exact import PIVOT_MARGIN, ExactTopK
from hvd_sparse.stream import SparseStream

NO_GRADIENTS: tuple[Tensor, ...] = ()


class ReusedThreshold(Selector):
    """Selects by a threshold that is evaluated exactly every `interval` steps.

    Attributes:
        interval: τ′, steps from one exact threshold to the next, at least 1.
        tolerance: How far nnz may be from k, as a share of k, before the threshold is put right.
        step: Steps done.
    """

    def __init__(self, interval: int = 32, tolerance: float = 0.1) -> None:
        self.interval = interval
        self.tolerance = tolerance
        self.step = 0
        self._exact = ExactTopK()

    @property
    def threshold(self) -> float:
        """`local_threshold`: the magnitude from which entries are selected."""
        return self._exact.threshold

    def select(self, residual: Tensor, gradients: Sequence[Tensor], k: int) -> SparseStream:
        """See `Selector.select`; nnz is within `k (1 ± tolerance)`, nonzeros permitting."""
        everything = k == residual.numel()  # density 1: no threshold may leave anything behind
        due = everything or self.step % self.interval == 0 or self.threshold == 0.0
        self.step += 1
        if due:
            return self._exact.select(residual, gradients, k)

        indices, values = ops.accumulate_select(residual, gradients, self.threshold)
        stream = SparseStream(indices, values, residual.numel())
        if stream.nnz > k * (1 + self.tolerance):
            return self._keep_largest(residual, stream, k)
        if stream.nnz < k * (1 - self.tolerance) and stream.isfinite():
            return self._take_more(residual, stream, k)
        return stream

    def _keep_largest(self, residual: Tensor, stream: SparseStream, k: int) -> SparseStream:
        """The threshold is too low: what passed holds the top k, so O(nnz) work cuts it there."""
        rest = stream.values.clone()
        order, values, threshold = ops.accumulate_topk(rest, NO_GRADIENTS, k)
        kept = SparseStream(stream.indices[order.long()], values, stream.numel)
        indices, values = ops.difference(stream.indices, stream.values, kept.indices)
        finite = values.isfinite()  # a non-finite entry has left its old value in the residual
        ops.scatter_add(residual, indices[finite], values[finite])
        self._follow(threshold)
        return kept

    def _take_more(self, residual: Tensor, stream: SparseStream, k: int) -> SparseStream:
        """The threshold is too high: what passed is the top of the top k; take the others."""
        indices, values, threshold = ops.accumulate_topk(
            residual, NO_GRADIENTS, k - stream.nnz, pivot=PIVOT_MARGIN * self.threshold
        )
        self._follow(threshold)
        merged = ops.merge_sum([stream.payload(), (indices, values)], stream.numel)
        return SparseStream(*merged, stream.numel)

    def _follow(self, threshold: float) -> None:
        if threshold < float("inf"):
            self._exact.threshold = threshold

    def state_dict(self) -> dict[str, Any]:
        """See `Selector.state_dict`."""
        return {"step": self.step, **self._exact.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Selector.load_state_dict`."""
        self.step = int(state["step"])
        self._exact.load_state_dict(state)
