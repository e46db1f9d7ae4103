"""What a selector is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hvd_sparse.errors import ConfigError
from hvd_sparse.stream import SparseStream


class Selector(ABC):
    """Adds gradients to a residual and takes out the entries that are to be sent.

    A selector belongs to one bucket and remembers its thresholds between steps.
    """

    @abstractmethod
    def select(self, residual: Tensor, gradients: Sequence[Tensor], k: int) -> SparseStream:
        """Accumulate, then take about `k` entries out.

        Args:
            residual: float32 `(n,)`; becomes `residual + gradient` without the taken entries. An
                entry that would become non-finite keeps its old value and is taken too.
            gradients: Contiguous tensors that lie side by side over the residual.
            k: Number of entries wanted, in `[0, n]`.

        Returns:
            The taken entries.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart for the next selection to be the same, bit for bit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        if state:
            raise ConfigError(f"{type(self).__name__} keeps no state, got {sorted(state)}")
