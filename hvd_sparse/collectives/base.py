"""What a sparse collective is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_sparse.errors import ConfigError
from hvd_sparse.stream import SparseStream
from hvd_sparse.transports import Transport


@dataclass(frozen=True)
class Reduction:
    """What came of one exchange.

    Attributes:
        reduced: The sum to be applied; the same bits on every rank.
        returned: This rank's entries that took no part in `reduced`. Summed over the ranks,
            `reduced` + Σ `returned` is the sum of the streams that went in.
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
    """

    def __init__(self, transport: Transport, numel: int, k: int) -> None:
        self.transport = transport
        self.numel = numel
        self.k = k

    @abstractmethod
    def reduce(self, stream: SparseStream) -> Reduction:
        """Sum the ranks' streams.

        Raises:
            TransportError: A peer is gone or did not answer; nothing was applied.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart for the next exchange to be the same, bit for bit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, which another world size may have written."""
        if state:
            raise ConfigError(f"{type(self).__name__} keeps no state, got {sorted(state)}")
