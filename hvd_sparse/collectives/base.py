"""What a sparse collective is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_sparse.accumulator import Scope
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Packer, Wire


@dataclass(frozen=True)
class Reduction:
    """What came of one exchange.

    Attributes:
        reduced: The sum to be applied; the same bits on every rank.
        returned: This rank's entries that took no part in `reduced`, and what rounding lost on the
            wire. Summed over the ranks, `reduced` + Σ `returned` is the sum of the streams that
            went in.
    """

    reduced: SparseStream
    returned: SparseStream


class Collective(ABC):
    """Sums one sparse stream per rank; belongs to one bucket.

    Every call is collective: all ranks of the transport make the same calls in the same order.

    Args:
        transport: Carries the messages.
        numel: n, length of the vectors.
        k: Number of entries wanted, in `[0, n]`.
        wire: The form of the messages.

    Attributes:
        step: Exchanges done.
    """

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        self.transport = transport
        self.numel = numel
        self.k = k
        self.wire = wire
        self.step = 0

    @abstractmethod
    def reduce(self, stream: SparseStream) -> Reduction:
        """Sum the ranks' streams.

        Raises:
            TransportError: A peer is gone or did not answer; nothing was applied.
        """

    def packer(self) -> Packer:
        """What encodes the messages of the exchange number `step`."""
        return Packer(self.wire, self.transport.rank, self.step)

    def scope(self) -> Scope | None:
        """Where this rank is to select in the step that comes; None: everywhere, all k entries."""
        return None

    def aim(self, k: int) -> None:
        """Want another number of entries from the next exchange on; all ranks alike."""
        self.k = k

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart for the next exchange to be the same, bit for bit."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, which another world size may have written."""
        self.step = int(state["step"])
