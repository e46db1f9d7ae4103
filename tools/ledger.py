"""The ledger of a training whose gradients are whole numbers: it balances to the last bit.

With `hvd.Sum` and a learning rate of 1, what all ranks have fed was either delivered, so that the
weights have moved by it, or waits in a residual. What is in neither is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import horovod.torch as hvd
import torch
from torch import Tensor, nn


class Ledger:
    """What this rank has fed into each parameter.

    Args:
        named_parameters: The parameters, all of which are zero before the first step.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = dict(named_parameters)
        self.fed = self.nothing()

    def nothing(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def feed(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self.fed[name] = self.fed[name] + gradient

    def lost(
        self,
        waits: Mapping[str, Tensor],
        scale: float = 1.0,
        departed: Mapping[str, Tensor] | None = None,
    ) -> float:
        """The largest entry that is missing or too much; all ranks call this.

        Args:
            waits: This rank's residuals, by name.
            scale: The loss scale that the residuals are in units of.
            departed: What ranks that are gone have delivered.

        Returns:
            0.0 if the ledger balances, and infinity if something is not finite.
        """
        zero = self.nothing()
        worst = 0.0
        for name, p in self.parameters.items():
            delivered = hvd.allreduce(
                self.fed[name] - waits.get(name, zero[name]) / scale,
                op=hvd.Sum,
                name=f"ledger.{name}",
            )
            difference = delivered + (departed or zero)[name] + p.detach()
            largest = difference.abs().max().item()
            worst = max(worst, largest if math.isfinite(largest) else math.inf)
        return worst
