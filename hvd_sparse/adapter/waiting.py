"""Waiting for Horovod without taking the processor that it needs.

Horovod's `synchronize` looks for its result without a pause, for as long as the slowest rank takes,
and every look takes a lock that the thread needs which is to bring the result. Where ranks are more
than cores, or data loaders share them, that costs more than the exchange: four ranks on two cores
take a third of the time per step when they sleep instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd

from hvd_sparse.transports.pauses import Pauses

SPIN_S = 0.2e-3
"""How long a wait does not sleep. It holds Python's lock so long, which the engine needs, too."""


def wait_for(handles: Iterable[int]) -> None:
    """Returns once Horovod's `synchronize` would return at once for every one of the handles."""
    pauses = Pauses(SPIN_S)
    for handle in handles:
        while not hvd.poll(handle):
            pauses.pause()


def synchronize_asleep(optimizer: Any) -> None:
    """Let a Horovod optimizer's `synchronize`, which `step` calls, sleep while it waits."""
    synchronize = optimizer.synchronize

    def synchronize_after_sleep() -> None:
        if optimizer.process_set.included():
            hand_over_rest(optimizer)
            handles = [handle for handle, _ in optimizer._handles.values()]
            wait_for(handle for handle in handles if not callable(handle))  # callable: two gathers
        synchronize()

    optimizer.synchronize = synchronize_after_sleep


def hand_over_rest(optimizer: Any) -> None:
    """Give Horovod the gradients that a backward pass left out: other ranks may wait for them.

    Its `synchronize` would begin with the same, and now finds nothing left to do.
    """
    handed_over: set[Any] = set()
    for key, (handle, _) in optimizer._handles.items():
        if handle is not None:
            handed_over.update(key if isinstance(key, tuple) else (key,))
    for parameter in optimizer._requires_update - handed_over:
        optimizer._handles[parameter] = optimizer._allreduce_grad_async(parameter)
