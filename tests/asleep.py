"""What workers wait for, they wait for asleep.

On few cores, ranks that spin in Horovod's own waits take the time that the others need, until
messages time out.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_sparse.transports.waiting import outcome_of, wait_for


def allreduce(tensor: Tensor, name: str) -> Tensor:
    """The average over all ranks."""
    mean: Tensor = outcome_of(hvd.allreduce_async(tensor, name=name, op=hvd.Average))
    return mean


def meet(name: str) -> None:
    """Returns when all ranks have come to it, as `hvd.barrier()` would."""
    allreduce(torch.zeros(1), f"meet.{name}")


def synchronize_asleep(optimizer: Any) -> None:
    """Let a Horovod optimizer sleep before it waits: ranks that spin starve the others."""
    synchronize = optimizer.synchronize

    def synchronize_after_sleep() -> None:
        on_their_way = {
            p
            for key, (handle, _) in optimizer._handles.items()
            for p in (key if isinstance(key, tuple) else (key,))
            if handle is not None
        }
        for p in optimizer._requires_update - on_their_way:
            optimizer._handles[p] = optimizer._allreduce_grad_async(p)
        handles = [handle for handle, _ in optimizer._handles.values() if not callable(handle)]
        wait_for(handles)
        synchronize()

    optimizer.synchronize = synchronize_after_sleep
