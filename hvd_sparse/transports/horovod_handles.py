"""Waiting for Horovod without taking the processor that it needs.

Horovod's `synchronize` looks for its result without a pause, for as long as the slowest rank takes,
and every look takes a lock that the thread needs which is to bring the result. Where ranks are more
than cores, or data loaders share them, that costs more than the exchange: steps of four ranks on
two cores take up to three times as long as when they sleep instead.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from typing import Any

# MERGED transports.pauses
# Pauses between two looks at something that has not come yet.

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


SPIN_S = 0.2e-3
"""How long a wait does not sleep. It holds Python's lock so long, which the engine needs, too."""


class HorovodWait:
    """Since when this process has waited for Horovod, for a thread that peers ask.

    Attributes:
        since: A value of `time.monotonic()`, or None where it does not wait.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.since = None

    def seconds(self) -> float:
        """How long it has waited."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since


WAITING = HorovodWait()
"""This process's: Horovod, too, is one for the whole process."""


def wait_for(handles: Iterable[int], deadline: float = math.inf) -> bool:
    """Wait until Horovod's `synchronize` would return at once for every one of the handles.

    Args:
        handles: Horovod's.
        deadline: When to give up, a value of `time.monotonic()`.

    Returns:
        Whether it would, at the deadline at the latest.
    """
    import horovod.torch as hvd

    pauses = Pauses(SPIN_S)
    with WAITING:
        for handle in handles:
            while not hvd.poll(handle):
                if time.monotonic() >= deadline:
                    return False
                pauses.pause()
    return True


def outcome_of(handle: int) -> Any:
    """What Horovod's `synchronize` returns."""
    import horovod.torch as hvd

    wait_for([handle])
    return hvd.synchronize(handle)
