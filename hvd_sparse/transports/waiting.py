"""Waiting without taking the processor that the awaited thing needs.

Horovod's `synchronize` polls for its result without a pause, for as long as the slowest rank takes.
Every poll takes a lock that Horovod's own thread needs to bring the result. With more ranks than
cores, or with data loaders beside them, that costs more than the exchange: steps of four ranks on
two cores take up to three times as long as when they sleep instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

SPIN_S = 0.2e-3
"""Spin this long before sleeping. Meanwhile Python's lock is held, which the engine needs, too."""

SLEPT_SHARE = 0.02
"""How long a sleep is, as a share of the time waited so far: a sleep adds no more than that."""

SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 0.5e-3


class Pauses:
    """The pauses of one wait: it yields the processor for `spin_s`, then sleeps, longer and longer.

    A sleep lasts `slept_share` of the time waited so far.
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
        """Pauses once; returns whether that was a sleep."""
        waited_s = time.monotonic() - self._began_at
        if waited_s < self._spin_s:
            os.sched_yield()  # a sleep of 0 s would take 50 µs, too
            return False
        sleep_s = max(self._slept_share * waited_s, SHORTEST_SLEEP_S)
        time.sleep(min(sleep_s, self._longest_sleep_s))
        return True


class HorovodWait:
    """Since when a rank waits for Horovod, with all begun that the transport's peers have begun."""

    def __init__(self) -> None:
        self.since: float | None = None

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.since = None

    def seconds(self) -> float:
        since = self.since
        return 0.0 if since is None else time.monotonic() - since


def wait_for(
    handles: Iterable[int],
    gives_up: Callable[[], object] = lambda: False,
    pauses: Pauses | None = None,
) -> bool:
    """Waits until Horovod's `synchronize` would return at once for each; says whether it would.

    `gives_up` is asked after each sleep whether to end the wait; it may raise.
    """
    import horovod.torch as hvd

    pauses = pauses or Pauses(SPIN_S)
    for handle in handles:
        while not hvd.poll(handle):
            if pauses.pause() and gives_up():
                return False
    return True


def outcome_of(handle: int) -> Any:
    """What Horovod's `synchronize` returns."""
    import horovod.torch as hvd

    wait_for([handle])
    return hvd.synchronize(handle)
