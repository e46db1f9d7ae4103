"""A world that is known through Horovod."""

from __future__ import annotations

import pickle
import time
from typing import Any

import torch

from hvd_sparse.errors import ConfigError, TransportTimeout
from hvd_sparse.transports.horovod_handles import outcome_of, wait_for


class HorovodBootstrap:
    """The ranks of one of Horovod's process sets; see `choose.Bootstrap`.

    Args:
        process_set: of Horovod's; all of its processes by default.

    Raises:
        ConfigError: Horovod is not initialised, or this process is not in the process set.
    """

    def __init__(self, process_set: Any = None) -> None:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            raise ConfigError("hvd.init() must come before the first gradient is compressed")
        self.process_set: Any = hvd.global_process_set if process_set is None else process_set
        if self.process_set.process_set_id is None:
            raise ConfigError(f"Horovod does not know the process set {self.process_set}")
        if self.process_set.process_set_id == 0:
            self.ranks = list(range(hvd.size()))
        else:
            self.ranks = list(self.process_set.ranks)
        self.global_rank: int = hvd.rank()
        if self.global_rank not in self.ranks:
            raise ConfigError(f"rank {self.global_rank} is not in the process set {self.ranks}")
        self.rank = self.ranks.index(self.global_rank)
        self.size = len(self.ranks)
        self.mpi_enabled = bool(hvd.mpi_enabled())

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, in the order of the ranks (Horovod's own takes no process set).

        Raises:
            TransportTimeout: Not all ranks took part within `timeout_s`. Horovod knows which, and
                says so in its own warning after HOROVOD_STALL_CHECK_TIME_SECONDS, 60 by default.
        """
        import horovod.torch as hvd

        # Never empty: Horovod treats tensors without elements differently on some backends.
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int64)
        gathering = [
            hvd.allgather_async(part, name=f"{name}.{what}", process_set=self.process_set)
            for what, part in (("size", size), ("data", data))
        ]
        deadline = time.monotonic() + timeout_s
        if not wait_for(gathering, deadline):
            raise TransportTimeout(
                f"rank {self.rank} has waited {timeout_s:g} s for the other {self.size - 1} ranks "
                f"to connect ({name}), and not all have come: each rank must give its optimizer a "
                "compression of hvd_sparse, and reach its first step within timeout_s of the others"
            )
        sizes, joined = map(outcome_of, gathering)
        return [pickle.loads(part.numpy().tobytes()) for part in joined.split(sizes.tolist())]
