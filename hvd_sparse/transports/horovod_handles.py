"""Waiting for Horovod without taking the processor that it needs.

Horovod's `synchronize` looks for its result without a pause, for as long as the slowest rank takes,
and every look takes a lock that the thread needs which is to bring the result. Where ranks are more
than cores, or data loaders share them, that costs more than the exchange: steps of four ranks on
two cores take up to three times as long as when they sleep instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from hvd_sparse.transports.pauses import Pauses

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
