"""Pauses between two looks at something that has not come yet."""

from __future__ import annotations

import os
import time

SLEPT_SHARE = 0.02
"""Of the time waited so far: what a sleep may add to a wait is a share of it."""

SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 0.5e-3


class Pauses:
    """The pauses of one wait: at first only for who else can run, then asleep, ever longer.

    The peer that is waited for may need this processor.

    Args:
        spin_s: How long the wait does not sleep: longer than what is soon there takes.
        slept_share: How long a sleep is, as a share of the time waited so far.
        longest_sleep_s: How long it is at most.
    """

    def __init__(
        self,
        spin_s: float,
        slept_share: float = SLEPT_SHARE,
        longest_sleep_s: float = LONGEST_SLEEP_S,
    ) -> None:
        self._spin_s = spin_s
        self._slept_share, self._longest_sleep_s = slept_share, longest_sleep_s
        self._began_at = time.monotonic()

    def pause(self) -> bool:
        """Pause once; returns whether that was a sleep."""
        waited_s = time.monotonic() - self._began_at
        if waited_s < self._spin_s:
            os.sched_yield()  # a sleep of 0 s would take 50 µs, too
            return False
        sleep_s = max(self._slept_share * waited_s, SHORTEST_SLEEP_S)
        time.sleep(min(sleep_s, self._longest_sleep_s))
        return True
