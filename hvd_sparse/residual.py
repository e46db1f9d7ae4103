"""Error feedback: what is not sent now is kept and sent later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.selectors import Selector
from hvd_sparse.stream import SparseStream


class ErrorFeedback:
    """The residual ε of one bucket (Ok-Topk, Algorithm 2, lines 4 and 6).

    The law that it keeps together with a collective, in exact arithmetic and summed over the ranks:
    residual before + gradient = what was applied + residual after.

    Attributes:
        residual: float32 `(n,)`, on the gradients' device; always finite.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)

    def take(self, gradients: Sequence[Tensor], selector: Selector, k: int) -> SparseStream:
        """Accumulate the gradients and take out what the selector picks."""
        return selector.select(self.residual, gradients, k)

    def undo(
        self, gradients: Sequence[Tensor], taken: SparseStream, returned: SparseStream
    ) -> None:
        """Go back to the residual before a step, to float32's rounding.

        Args:
            gradients: What the step added.
            taken: What it took out.
            returned: What of it was given back.
        """
        finite = taken.values.isfinite()  # a non-finite entry left its old residual in place
        self.give_back(taken.where(finite))
        self.give_back(returned.where(returned.values.isfinite()).times(-1.0))
        untouched = taken.where(~finite).indices.long()
        old = self.residual[untouched]
        start = 0
        for gradient in gradients:
            stop = start + gradient.numel()
            self.residual[start:stop] -= gradient.flatten().float().nan_to_num(0.0, 0.0, 0.0)
            start = stop
        self.residual[untouched] = old

    def give_back(self, returned: SparseStream) -> None:
        """Keep entries that were taken out, but had no part in what was applied; all finite."""
        if returned.nnz:
            returned = returned.to(self.residual.device)
            ops.scatter_add(self.residual, returned.indices, returned.values)
