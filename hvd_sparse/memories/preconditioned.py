"""Error feedback in units of steps: what waits is compared by how far it would move the weights.

Symbols: ε residual, g gradient, D = 2^e a unit for each element, Adam's √v as a power of two
(`hvd_sparse.SparseAdamW` has v and e).

Steps: ε/D = ε/D + g/D; a selector takes entries out, as from plain error feedback; the optimizer
sees D times the sum over the ranks.

Adam divides by √v: the largest |ε|/√v are the longest steps, the largest |ε| those of the layers
with the largest gradients. Powers of two divide and multiply without rounding, but for denormals:
nothing else changes, and a state is in units of the gradients. Cost: one more pass, and 4 bytes per
element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.memories.error_feedback import ErrorFeedback
from hvd_sparse.streams import DenseSum, Part, Sum


class Preconditioned(ErrorFeedback):
    """ε/D, which is the `residual`, and D of one bucket; the law of `ErrorFeedback` holds for ε.

    Gradients that are accumulated are divided in place, as clipping changes them in place.

    Attributes:
        unit: D, float32 `(n,)`; None: 1 everywhere, as in the first step and after `tensors`.
    """

    unit: Tensor | None = None

    def precondition(self, start: int, exponents: Tensor) -> None:
        """Change the units from element `start` on to 2^e, between steps: int8 `(m,)`."""
        if self.unit is None:
            self.unit = torch.ones_like(self.residual)
        self._may_roll_back = False  # what was before the step is in other units
        place = slice(start, start + exponents.numel())
        unit = torch.exp2(exponents.float())
        self.residual[place].mul_(self.unit[place].div_(unit))
        self.unit[place] = unit

    @override
    def applied(self, reduced: Sum) -> Sum:
        if self.unit is None:
            return reduced
        if isinstance(reduced, DenseSum):
            return DenseSum(tuple(map(self._weighed, reduced.parts)), reduced.numel)
        return self._weighed(Part.of(reduced)).to_stream(reduced.numel)

    def _weighed(self, part: Part) -> Part:
        """Part of a sum, in units of the gradients."""
        assert self.unit is not None
        unit = self.unit[part.start : part.stop]
        if part.indices is not None:
            unit = unit[part.indices.to(unit.device).long() - part.start]
        values = part.values * unit.to(part.values.device)
        return Part(part.indices, values, part.start, part.stop)

    @override
    def tensors(self) -> dict[str, Tensor]:
        if self.unit is not None:
            self.residual.mul_(self.unit)
            self.unit, self._may_roll_back = None, False
        return super().tensors()

    @override
    def _accumulation(self, gradients: Sequence[Tensor], before: ops.Before) -> ops.Accumulation:
        if self.unit is not None:
            units = self.unit.split([g.numel() for g in gradients])
            gradients = [
                g.float().div_(u.view_as(g)) for g, u in zip(gradients, units, strict=True)
            ]
        return super()._accumulation(gradients, before)

    @override
    def _l1(self, tensor: Tensor) -> float:
        return super()._l1(tensor if self.unit is None else tensor * self.unit)
