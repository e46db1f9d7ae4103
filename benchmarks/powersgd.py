"""PowerSGD on one process's ranks (Vogels, Karimireddy, Jaggi, NeurIPS 2019, algorithms 1 and 2).

Torch's own is a hook of DistributedDataParallel, which needs a process for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Mean = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PowerSgd:
    """The method: the rank r of what is sent of a matrix."""

    rank: int


@dataclass
class Compressed:
    """What one rank keeps of its matrices.

    Attributes:
        rank: r.
        mean: Averages a tensor over all ranks.
        sent: Elements averaged so far.
    """

    rank: int
    mean: Mean
    sent: int = 0
    _errors: dict[str, Tensor] = field(default_factory=dict)
    _right: dict[str, Tensor] = field(default_factory=dict)

    def average(self, name: str, gradient: Tensor) -> Tensor:
        """A matrix's mean over the ranks, of rank r; the same on all of them."""
        M = gradient.flatten(1)
        M = M + self._errors.get(name, 0.0)
        if name not in self._right:  # from one seed: the same on all ranks
            generator = torch.Generator().manual_seed(len(self._right))
            self._right[name] = torch.randn(M.shape[1], self.rank, generator=generator)
        P = torch.linalg.qr(self.mean(M @ self._right[name]))[0]
        Q = self._right[name] = self.mean(M.T @ P)
        self.sent += P.numel() + Q.numel()
        approximation = P @ Q.T
        self._errors[name] = M - approximation
        result: Tensor = approximation.view_as(gradient)
        return result
