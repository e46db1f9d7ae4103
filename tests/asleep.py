"""What workers wait for, they wait for asleep.

On few cores, ranks that spin in Horovod's own waits take the time that the others need, until
messages time out.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_sparse.transports.horovod_handles import outcome_of


def allreduce(tensor: Tensor, name: str) -> Tensor:
    """The average over all ranks."""
    mean: Tensor = outcome_of(hvd.allreduce_async(tensor, name=name, op=hvd.Average))
    return mean


def meet(name: str) -> None:
    """Returns when all ranks have come to it, as `hvd.barrier()` would."""
    allreduce(torch.zeros(1), f"meet.{name}")
