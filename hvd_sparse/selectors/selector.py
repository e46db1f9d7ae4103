"""The interface of a selector, and what selectors share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.streams import SparseStream

MASK = (1 << 64) - 1


class Stateful:
    """What goes on from step to step: numbers, the attributes named in `kept`, in the state."""

    kept: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart for the next selection to be the same, bit for bit."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for name in self.kept:
            setattr(self, name, type(getattr(self, name))(state[name]))


class Selector(Stateful, ABC):
    """Takes the entries that are to be sent out of an accumulator.

    A selector belongs to one bucket and remembers its thresholds between steps.

    Attributes:
        tolerance: How far the number of entries may be from k, as a share of k.
        is_common: Whether it must be in the same state on all ranks.
    """

    tolerance: float = 0.1
    is_common: ClassVar[bool] = False

    @abstractmethod
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        """Take about `accumulator.scope.share` of `k` entries out of the accumulator's scope.

        k entries are wanted from all ranks' scopes together, in `[0, n]`. Gradients are added in
        any case, and non-finite entries are taken wherever they were.
        """


def own_k(accumulator: Accumulator, k: int) -> int:
    """This rank's part of `k`, at most as many as its scope has elements."""
    return min(accumulator.width, round(accumulator.scope.share * k))


def mixed(seed: int, step: int) -> int:
    """64 well-mixed bits that depend on a seed and a step, and on nothing else.

    Source: splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    x = (seed + (step + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
