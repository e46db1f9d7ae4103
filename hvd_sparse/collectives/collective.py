"""The interface of a sparse collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hvd_sparse.accumulator import Scope
from hvd_sparse.streams import SparseStream, Sum
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Packer, Wire

TakeAt = Callable[[Tensor], Tensor]
"""Takes the entries at int32 ascending indices out of this rank's accumulator: their values."""


@dataclass(frozen=True)
class Reduction:
    """The sum to be applied, with the same bits on every rank, and what this rank has left.

    `returned` has this rank's entries that took no part in `reduced`, and what rounding lost on the
    wire: `reduced` + Σ `returned` over the ranks is the sum of the streams that went in.
    """

    reduced: Sum
    returned: SparseStream


class Collective(ABC):
    """Sums one sparse stream per rank; belongs to one bucket of n = `numel` elements.

    Every call is collective: all ranks of the transport make the same calls in the same order. `k`
    entries are wanted, in `[0, n]`, and `step` exchanges are done. A state has the attributes named
    in `kept`.
    """

    kept: ClassVar[tuple[str, ...]] = ("step",)

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        self.transport = transport
        self.numel = numel
        self.k = k
        self.wire = wire if transport.world_size > 1 else PLAIN  # nothing travels
        self.step = 0

    @property
    def chosen(self) -> Collective:
        """The collective that does the work: this one, unless it chooses among others."""
        return self

    def reads_on(self, device: torch.device) -> bool:
        """Whether `reduce` reads streams on a device alone; others are on the host, too."""
        del device
        return False

    @abstractmethod
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """Sum the ranks' streams.

        Args:
            stream: What this rank selected; on the host, or where `reads_on` allows it. Sums are
                taken at its `home`, and what is returned is there.
            take_at: Gives what the accumulator holds at other indices, once the stream is out of
                it; None: nothing. Only collectives that sum at other ranks' indices call it.

        Raises:
            TransportError: A peer is gone or did not answer; nothing was applied.
        """

    def packer(self, stream: SparseStream) -> Packer:
        """The encoder of the messages of exchange number `step`, which sums streams like this."""
        return Packer(self.wire, self.transport.rank, self.step, stream.home)

    def gather_counts(self, *counts: int) -> list[list[int]]:
        """Every rank's, by count and rank; collective."""
        mine = torch.tensor(counts, dtype=torch.int64, device="cpu")
        gathered = self.transport.allgather((mine,), channel="shares")
        columns: list[list[int]] = torch.stack([m.view(torch.int64) for m in gathered]).T.tolist()
        return columns

    def scope(self) -> Scope | None:
        """Where this rank is to select in the next step; None: everywhere, all k entries."""
        return None

    def aim(self, k: int) -> None:
        """Set k from the next exchange on; all ranks alike."""
        self.k = k

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart for the next exchange to be the same, bit for bit."""
        return {name: deepcopy(getattr(self, name)) for name in self.kept}

    def common(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What of a `state_dict()` is the same on all ranks; they go on from such ones alone."""
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, which another world size may have written."""
        for name in self.kept:
            setattr(self, name, deepcopy(state[name]))
