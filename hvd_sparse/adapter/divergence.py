"""Do all ranks still hold the same weights? Asked after the first step, and then now and then.

Ranks that reduce the same gradients stay identical, bit for bit. A flipped bit in memory, weights
that were never broadcast, or an update that a script makes on one rank alone end that, and nothing
else would say so.

Scripts may move weights within a step, each rank by a gradient of its own. So they are looked at
when a step has ended, too, and again in the next step where only what is new differs.

Cost: some passes over the weights and a message of 16 bytes per tensor, every `INTERVAL_STEPS`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.errors import warn
from hvd_sparse.transports import Transport

INTERVAL_STEPS = 1000
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes that they share with an element of a weight."""


class Divergence:
    """Compares the ranks' weights.

    Args:
        parameters: Those that the optimizer updates, sparse and dense; the same on all ranks.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        self._parameters = list(parameters)
        self._step = 1  # the first step, numbered 0, is that in which the ranks connect
        self._left: Tensor | None = None
        self._again = False

    @property
    def _is_due(self) -> bool:
        """Whether the next step is to compare."""
        return bool(self._parameters) and (self._again or (self._step - 1) % INTERVAL_STEPS == 0)

    def stepped(self) -> None:
        """An optimizer's step has ended: scripts may move weights until gradients are there."""
        if self._is_due:
            self._left = self._digests()

    def begin_step(self) -> bool:
        """Count a step; returns whether weights are to be compared in it. The same on all ranks."""
        is_due = self._is_due
        self._step += 1
        return is_due

    def compare(self, transport: Transport) -> None:
        """Compare the ranks' weights; all ranks call this together. Warns once."""
        found = self._compare(transport)
        if found:
            self._parameters = []
            warn(found)

    def _compare(self, transport: Transport) -> str:
        """The first rank that differs from rank 0, and where; "" where none does."""
        now = self._digests()
        mine = torch.stack([now, now if self._left is None else self._left])
        self._left = None
        gathered = transport.allgather((mine,), channel="weights")
        theirs = torch.stack([m.view(torch.int64).view(mine.shape) for m in gathered])
        differ = theirs != theirs[0]
        differs = differ.all(1).nonzero().tolist()  # now, and when the last step had ended
        self._again = not self._again and bool(differ.any()) and not differs
        if not differs:
            return ""
        rank, place = differs[0]
        return (
            f"rank {rank} has other weights than rank 0 in {self._parameters[place][0]!r} and "
            f"{len([r for r, _ in differs if r == rank]) - 1} more tensors before step "
            f"{self._step - 1}: broadcast rank 0's weights, or go back to a checkpoint; ranks that "
            "train on will not become equal again"
        )

    def _digests(self) -> Tensor:
        digests = [digest(p) for _, p in self._parameters]
        return torch.stack([each.to(digests[0].device) for each in digests]).cpu()


def digest(parameter: Tensor) -> Tensor:
    """A sum that differs where one bit does, int64 ()."""
    flat = parameter.detach().contiguous().view(-1)
    return flat.view(WORDS[min(8, flat.element_size())]).sum(dtype=torch.int64)
