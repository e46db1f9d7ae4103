"""Every fault in every phase of a training: how each process ends. See `adapter_exits.py`.

    python fault_matrix.py PHASE-FAULT...     worlds of three ranks under gloo, one by one

Rank 1 fails. In the phases in which ranks wait for each other it waits then, too: rank 2 is late.
After a `double` fault, rank 0 is killed soon after rank 1 was.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import horovod.torch as hvd
import torch
from torch import nn

from hvd_sparse import Compression
from tests.workers.adapter_exits import FAILING, TIMEOUT_S, main

STEPS = 5
FAILED_STEP = 3
LATE_S = 1.0
HOROVODS_TIMEOUT_S = "10"
"""How long a message of Horovod's own may take; in a commit and a checkpoint, ranks wait for it."""
TWO_LEVELS = "HVD_SPARSE_TEST_TWO_LEVELS"
"""A variable: if it is there, ranks exchange in two levels."""
SECOND_S = 0.3
"""Between the two deaths of a double fault."""
AFTER_S = 0.4
"""From when a rank begins to wait until it fails."""

WAITING_PHASES = ("connect", "exchange", "commit", "checkpoint")
"""Phases in which the failing rank waits for rank 2."""

PHASES = ("forward", "backward", "between", *WAITING_PHASES)

FAULTS: Mapping[str, int] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "raise": signal.SIGUSR1,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "double": signal.SIGKILL,
}
"""What the failing rank gets, by name."""


def fail(signal_number: int, frame: object) -> NoReturn:
    raise ValueError("a failure of the script's own")


class Fault:
    """One fault in one phase; `at` is called in every phase of every step."""

    def __init__(self, case: str, failed_at: Path) -> None:
        self._phase, _, fault = case.partition("-")
        self._double = fault == "double"
        self._signal = FAULTS.get(fault)
        self._failed_at = failed_at
        self._step = 0 if self._phase == "connect" else FAILED_STEP
        signal.signal(signal.SIGUSR1, fail)

    def at(self, phase: str, step: int) -> None:
        """Fail, be late or do nothing, as this rank is to do in this phase."""
        if phase == "between" and self._phase == "nothing" and step == STEPS - 1:
            self._failed_at.write_text(str(time.time()))  # the end of the last step
        if self._signal is None or phase != self._phase or step != self._step:
            return
        waits = phase in WAITING_PHASES
        if hvd.rank() == FAILING:
            if waits:
                self._later(AFTER_S, self._fail)
            else:
                time.sleep(LATE_S)  # its peers wait for it by then
                self._fail()
        elif hvd.rank() == 0 and self._double:
            self._later(0.0, self._die_second)
        elif hvd.rank() == 2 and waits:
            time.sleep(LATE_S)

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def _die_second(self) -> None:
        while not self._failed_at.exists():
            time.sleep(0.01)
        time.sleep(SECOND_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def _fail(self) -> None:
        assert self._signal is not None
        self._failed_at.write_text(str(time.time()))
        os.kill(os.getpid(), self._signal)


class Model(nn.Module):
    """Two buckets, and biases that go through Horovod."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 256)


def train(case: str, failed_at: Path) -> None:
    """Train on; the fault comes in the fourth step, or the first where ranks connect in it."""
    fault = Fault(case, failed_at)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = HOROVODS_TIMEOUT_S
    hvd.init()
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(hvd.rank())
    compression = Compression.topk(
        model.named_parameters(),
        bucket_numel=1 << 16,
        timeout_s=TIMEOUT_S,
        hierarchical=TWO_LEVELS in os.environ,
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    state = hvd.elastic.TorchState(model, optimizer, compression=compression, step=0)
    folder = hvd.broadcast_object(tempfile.mkdtemp(), name="folder")
    for step in range(STEPS):
        optimizer.zero_grad()
        fault.at("connect", step)
        fault.at("exchange", step)
        hidden = model.first(torch.randn(4, 256))
        fault.at("forward", step)
        # Runs once the second layer's gradient is there, before the first layer's.
        hidden.register_hook(lambda gradient, step=step: fault.at("backward", step))
        model.second(hidden).square().mean().backward()
        optimizer.step()
        fault.at("between", step)
        # Horovod waits in these by its own timers: a stopped rank is to be met in an exchange.
        if case.startswith(("commit", "nothing")):
            fault.at("commit", step)
            state.commit()
        if case.startswith(("checkpoint", "nothing")):
            fault.at("checkpoint", step)
            compression.save_checkpoint(folder)


if __name__ == "__main__":
    main(train)
