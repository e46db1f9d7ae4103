"""Every fault in every phase of a training: all ranks end, in time, and say why.

Where a rank ends between `backward()` and `step()`, see tests/adapter/test_exit.py.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import hvd_sparse
from hvd_sparse import Compression
from tests.adapter.test_exit import FAILING, TIMEOUT_S, WORLD_SIZE, main
from tests.endings import Ending, endings_in
from tests.launch import TESTS, horovodrun, launch_environment
from tests.lean import start_lean, start_with_compiler
from tests.rest import ALL, rest

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

DDP = "ddp."
"""Before the name of a case: under DDP, where elastic states have no commit."""

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

    def __init__(self, case: str, failed_at: Path, rank: int) -> None:
        self._rank = rank
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
        if self._rank == FAILING:
            if waits:
                self._later(AFTER_S, self._fail)
            else:
                time.sleep(LATE_S)  # its peers wait for it by then
                self._fail()
        elif self._rank == 0 and self._double:
            self._later(0.0, self._die_second)
        elif self._rank == 2 and waits:
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
    """Two buckets, and biases that the framework reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 256)
        self.at: Callable[[str], None] = str

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.at("forward")
        # Runs once the second layer's gradient is there, before the first layer's.
        hidden.register_hook(lambda gradient: self.at("backward"))
        found: Tensor = self.second(hidden)
        return found


def train(case: str, failed_at: Path) -> None:
    """Train on; the fault comes in the fourth step, or the first where ranks connect in it."""
    is_ddp, case = case.startswith(DDP), case.removeprefix(DDP)
    model = whole = Model()
    compression = Compression.topk(
        model.named_parameters(),
        bucket_numel=1 << 16,
        timeout_s=TIMEOUT_S,
        hierarchical=TWO_LEVELS in os.environ,
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_ddp:
        rank, store = int(os.environ["HOROVOD_RANK"]), failed_at.with_name("store")
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD_SIZE)
        whole = DistributedDataParallel(model, bucket_cap_mb=0.2)
        hvd_sparse.ddp.register(whole, compression)
    else:
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = HOROVODS_TIMEOUT_S
        hvd.init()
        rank = hvd.rank()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression
        )
        state = hvd.elastic.TorchState(model, optimizer, compression=compression, step=0)
    fault = Fault(case, failed_at, rank)
    for step in range(STEPS):
        model.at = partial(fault.at, step=step)
        optimizer.zero_grad()
        model.at("connect")
        model.at("exchange")
        whole(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        model.at("between")
        # Horovod waits in these by its own timers: a stopped rank is to be met in an exchange.
        if case.startswith(("commit", "nothing")) and not is_ddp:
            model.at("commit")
            state.commit()
        if case.startswith(("checkpoint", "nothing")):
            model.at("checkpoint")
            compression.save_checkpoint(failed_at.with_name("checkpoint"))


pytestmark = [pytest.mark.launches, pytest.mark.slow, pytest.mark.timeout(900)]

EXIT_S = 10.0
"""What a process may take to end, beyond the timeout."""

WORLDS = 3
"""Worlds at a time: most of the time they wait."""

REST = ("connect", "exchange", "commit", "checkpoint")
"""Phases of a death under MPI that only `make faults` tries."""


CASES = [
    f"{phase}-{fault}"
    for p, phase in enumerate(PHASES)
    for f, fault in enumerate(FAULTS)
    if ALL or p % 3 == f % 3
]
"""All, or two faults in each phase, and each fault in two phases at least."""
DDP_CASES = [f"{DDP}{case}" for case in CASES[:: 1 if ALL else 2] if not case.startswith("commit")]
"""Every second one, or all: most of what ends a wait is common to both doors."""

CLEAN = ["nothing-first", "nothing-last"]
"""Without a fault, before the others and after: how long an end takes on this machine."""

CODES = {
    "kill": -signal.SIGKILL,
    "stop": -signal.SIGKILL,  # by the test, in the end
    "raise": 1,
    "interrupt": -signal.SIGINT,
    "terminate": -signal.SIGTERM,
    "double": -signal.SIGKILL,
}

NAMED = r"HorovodInternalError: hvd_sparse: .*\brank 1\b"

NAMED_BY_DDP = r"hvd_sparse\.errors\.\w+: .*\brank 1\b"

NAMING = {"forward": (0, 2), "backward": (0, 2), "between": (0, 2)}
"""Survivors that name rank 1, by phase. Others wait for Horovod alone, which names no rank, or
come to their exchange when Horovod has ended: in "exchange" rank 2, and by it rank 0."""

NAMED_BY_ONE = ("commit", "checkpoint")
"""Phases in which a survivor names rank 1, and the other may be through with that exchange."""


def ended(cases: list[str]) -> dict[str, list[Ending]]:
    """How all ranks ended in each case; one process, which imports what they need once."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "faults/test_matrix.py"), *cases],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return endings_in(done.stdout)


@pytest.fixture(scope="module")
def endings() -> dict[str, list[Ending]]:
    """Of all cases, and of a training without a fault beside them."""
    shares = [CASES[i::WORLDS] for i in range(WORLDS)]
    shares[0].insert(0, CLEAN[0])
    shares[-1].append(CLEAN[1])
    shares.append(DDP_CASES)
    with ThreadPoolExecutor(WORLDS) as pool:
        found = {case: e for share in pool.map(ended, shares) for case, e in share.items()}
    assert {case: len(e) for case, e in found.items()} == dict.fromkeys(
        [*CLEAN, *CASES, *DDP_CASES], WORLD_SIZE
    )
    for fault in FAULTS:
        seconds = [e.seconds for case in found if case.endswith(f"-{fault}") for e in found[case]]
        print(f"{fault}: after {max(seconds):.1f} s at most all ranks had ended")
    return found


def test_a_training_without_a_fault_ends_with_status_0(endings: dict[str, list[Ending]]) -> None:
    for case in CLEAN:
        assert [ending.code for ending in endings[case]] == [0] * WORLD_SIZE


@pytest.mark.parametrize("case", [*CASES, *DDP_CASES])
def test_all_ranks_end_in_time_and_say_why(endings: dict[str, list[Ending]], case: str) -> None:
    phase, _, fault = case.removeprefix(DDP).partition("-")
    failed = endings[case][FAILING]
    assert failed.code == CODES[fault], failed
    if fault == "raise":
        assert "ValueError: a failure of the script's own" in failed.stderr
    survivors = {rank: end for rank, end in enumerate(endings[case]) if rank != FAILING}
    if fault == "double" and survivors[0].code == -signal.SIGKILL:  # else the first was its end
        del survivors[0]
    for rank, survivor in survivors.items():
        assert survivor.code == 1, survivor
        if case.startswith(DDP):
            assert re.search(NAMED_BY_DDP, survivor.stderr), survivor
            is_told = "a failure of the script's own" in survivor.stderr
            assert is_told or fault != "raise" or phase == "connect", survivor
            continue
        assert "HorovodInternalError" in survivor.stderr, survivor
        if rank in NAMING.get(phase, ()):
            assert re.search(NAMED, survivor.stderr), survivor
    if phase in NAMED_BY_ONE and not case.startswith(DDP):
        assert any(re.search(NAMED, e.stderr) for e in survivors.values()), survivors
    if fault == "stop":  # the test itself ends the stopped one
        assert_in_time([*survivors.values()], [end for clean in CLEAN for end in endings[clean]])
    else:
        assert_in_time(endings[case], [end for clean in CLEAN for end in endings[clean]])


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
@pytest.mark.parametrize("phase", ["between", *(pytest.param(p, marks=rest) for p in REST)])
def test_a_death_ends_a_job_under_mpi(tmp_path: Path, phase: str) -> None:
    """Here mpirun does so; for other failures see tests/adapter/test_exit.py."""
    folder = tmp_path / "world"
    case = f"{phase}-kill"
    done = horovodrun(
        3, "faults/test_matrix.py", case, folder, controller="mpi", timeout=190, check=False
    )
    seconds = time.time() - float((folder / "failed_at").read_text())
    assert done.returncode != 0
    assert seconds < TIMEOUT_S + 2 * EXIT_S  # the launcher's own end, too


def assert_in_time(endings: list[Ending], clean: list[Ending]) -> None:
    """Within the bound, and a few times what a clean end takes on this machine just now."""
    limit_s = TIMEOUT_S + EXIT_S + 3 * max(ending.seconds for ending in clean)
    for ending in endings:
        assert not math.isnan(ending.seconds), ending
        assert ending.seconds < limit_s, ending


@rest
@pytest.mark.parametrize("phase", ["forward", "between"])
def test_a_stopped_worker_of_two_levels_is_named(tmp_path: Path, phase: str) -> None:
    """Its neighbour waits for it in the memory that they share, the others for messages."""
    done = horovodrun(
        *(4, "faults/test_matrix.py", f"{phase}-stop", tmp_path / "world"),
        hosts="localhost:2,127.0.0.1:2",
        env={TWO_LEVELS: "1"},
        timeout=190,
        check=False,
    )
    endings = endings_in(done.stdout)[f"{phase}-stop"]
    survivors = [ending for ending in endings if ending.code != CODES["stop"]]
    assert len(survivors) == 3, endings
    assert all(re.search(NAMED, survivor.stderr) for survivor in survivors), survivors


if __name__ == "__main__":
    main(train, start_with_compiler if sys.argv[1].startswith(DDP) else start_lean)
