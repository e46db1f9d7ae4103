"""A Horovod optimizer that sleeps while it waits for other ranks."""

from __future__ import annotations

from typing import Any

from hvd_sparse.transports.horovod_handles import wait_for


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
