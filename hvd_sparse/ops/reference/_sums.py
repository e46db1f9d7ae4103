"""The sums of an accumulation, from which entries move out."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.magnitude import INFINITE_KEY, magnitude_keys
from hvd_sparse.ops.accumulation import Accumulation


class Sums:
    """The residual plus the gradients; nothing is written back before `move_out`.

    Attributes:
        acc: The sums, float32 `(n,)`.
        keys: Their magnitudes as integers.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        before = accumulation.unchanged()
        residual, momentum = before.residual, before.momentum
        if len(accumulation.gradients) == 0:
            self.acc = residual.clone()
        else:
            g = torch.cat([gradient.reshape(-1).float() for gradient in accumulation.gradients])
            if momentum is None:
                self.acc = residual + g
            elif momentum.nesterov:
                self._u = (momentum.buffer + g) * momentum.factor
                self.acc = residual + self._u + g
            else:
                self._u = momentum.buffer * momentum.factor + g
                self.acc = residual + self._u
        self.keys = magnitude_keys(self.acc)

    def move_out(self, selected: Tensor) -> tuple[Tensor, Tensor]:
        """Leaves in the residual what is not selected, and returns what is.

        Where a sum is not finite, the old value stays, be it selected or not.

        Args:
            selected: int64 indices, ascending.
        """
        values = self.acc[selected]
        spoiled = self.keys >= INFINITE_KEY
        kept = self.acc.index_fill(0, selected, 0.0)
        accumulation = self._accumulation.in_place()
        _update(accumulation.residual, kept, spoiled)
        if accumulation.momentum is not None:
            _update(accumulation.momentum.buffer, self._u, spoiled)
        return selected.to(torch.int32), values


def _update(x: Tensor, updated: Tensor, spoiled: Tensor) -> None:
    """Writes to `x`; where it is spoiled, `x` stays as it was (0 if that was not finite either)."""
    before = torch.where(magnitude_keys(x) < INFINITE_KEY, x, 0.0)
    x.copy_(torch.where(spoiled, before, updated))
