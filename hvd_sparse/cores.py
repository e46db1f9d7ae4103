"""Cores of its own for each worker of a host, where the workers fill it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

VARIABLE = "HVD_SPARSE_BIND"
"""1: a compression binds its worker when it connects; `hvd-sparse tuned` sets it."""
MOST_CORES = 4
"""Workers with more cores than that each are left to the scheduler, which has room for all."""


def own_cores(local_rank: int, local_size: int, cores: Sequence[int]) -> set[int]:
    """A worker's equal part of a host's cores; empty: none are."""
    each = len(cores) // local_size
    if local_size == 1 or not 1 <= each <= MOST_CORES:
        return set()
    return set(cores[local_rank * each : (local_rank + 1) * each])


def bind(local_rank: int, local_size: int) -> None:
    """Bind all threads of this process to cores of its own, if the environment asks for it.

    Threads that are there already are bound, too, such as Horovod's; later ones inherit it.
    """
    if os.environ.get(VARIABLE) != "1" or not hasattr(os, "sched_setaffinity"):
        return
    cores = _cores()
    mine = own_cores(local_rank, local_size, cores) or set(cores)
    is_due = mine not in (set(), os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task") if is_due else ():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), mine)


@cache
def _cores() -> list[int]:
    """Those that the host's workers share, before this process was bound."""
    cores = os.sched_getaffinity(0)
    return sorted(cores) if cores == os.sched_getaffinity(os.getppid()) else []
