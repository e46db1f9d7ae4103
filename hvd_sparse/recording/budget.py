"""Time that may be spent, as a share of the time that passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

SAVED_S = 0.1
"""Most that is put by, so that a pause is not followed by a burst."""


class Budget:
    """Earns a share of the time that passes, and says what it can pay for.

    Args:
        share: Of the time, in (0, 1).
        clock: Seconds, from any start.
    """

    def __init__(self, share: float, clock: Callable[[], float] = perf_counter) -> None:
        self.share = share
        self.spent_s = 0.0
        self._clock = clock
        self._balance_s = 0.0
        self._last = clock()

    def covers(self, cost_s: float) -> bool:
        """Whether something of that cost can be paid for now."""
        now = self._clock()
        self._balance_s = min(SAVED_S, self._balance_s + self.share * (now - self._last))
        self._last = now
        return self._balance_s >= min(cost_s, SAVED_S)

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Pay for what a block takes, whatever it is: the balance may fall below zero."""
        start = self._clock()
        try:
            yield
        finally:
            cost_s = self._clock() - start
            self._balance_s -= cost_s
            self.spent_s += cost_s
