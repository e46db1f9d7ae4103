"""Every fault in every phase of a training: all ranks end, in time, and say why.

Where a rank ends between `backward()` and `step()`, see tests/adapter/test_exit.py.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.endings import Ending, endings_in
from tests.launch import WORKERS, horovodrun, launch_environment
from tests.rest import ALL, rest
from tests.workers.adapter_exits import FAILING, TIMEOUT_S, WORLD_SIZE
from tests.workers.fault_matrix import FAULTS, PHASES, TWO_LEVELS

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

NAMING = {"forward": (0, 2), "backward": (0, 2), "between": (0, 2)}
"""Survivors that name rank 1, by phase. Others wait for Horovod alone, which names no rank, or
come to their exchange when Horovod has ended: in "exchange" rank 2, and by it rank 0."""

NAMED_BY_ONE = ("commit", "checkpoint")
"""Phases in which a survivor names rank 1, and the other may be through with that exchange."""


def ended(cases: list[str]) -> dict[str, list[Ending]]:
    """How all ranks ended in each case; one process, which imports what they need once."""
    done = subprocess.run(
        [sys.executable, str(WORKERS / "fault_matrix.py"), *cases],
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
    with ThreadPoolExecutor(WORLDS) as pool:
        found = {case: e for share in pool.map(ended, shares) for case, e in share.items()}
    assert {case: len(e) for case, e in found.items()} == dict.fromkeys(
        [*CLEAN, *CASES], WORLD_SIZE
    )
    for fault in FAULTS:
        seconds = [e.seconds for case in CASES if case.endswith(f"-{fault}") for e in found[case]]
        print(f"{fault}: after {max(seconds):.1f} s at most all ranks had ended")
    return found


def test_a_training_without_a_fault_ends_with_status_0(endings: dict[str, list[Ending]]) -> None:
    for case in CLEAN:
        assert [ending.code for ending in endings[case]] == [0] * WORLD_SIZE


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_in_time_and_say_why(endings: dict[str, list[Ending]], case: str) -> None:
    phase, _, fault = case.partition("-")
    failed = endings[case][FAILING]
    assert failed.code == CODES[fault], failed
    if fault == "raise":
        assert "ValueError: a failure of the script's own" in failed.stderr
    survivors = {rank: end for rank, end in enumerate(endings[case]) if rank != FAILING}
    if fault == "double" and survivors[0].code == -signal.SIGKILL:  # else the first was its end
        del survivors[0]
    for rank, survivor in survivors.items():
        assert survivor.code == 1, survivor
        assert "HorovodInternalError" in survivor.stderr, survivor
        if rank in NAMING.get(phase, ()):
            assert re.search(NAMED, survivor.stderr), survivor
    if phase in NAMED_BY_ONE:
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
        3, "fault_matrix.py", case, folder, controller="mpi", timeout=190, check=False
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
        *(4, "fault_matrix.py", f"{phase}-stop", tmp_path / "world"),
        hosts="localhost:2,127.0.0.1:2",
        env={TWO_LEVELS: "1"},
        timeout=190,
        check=False,
    )
    endings = endings_in(done.stdout)[f"{phase}-stop"]
    survivors = [ending for ending in endings if ending.code != CODES["stop"]]
    assert len(survivors) == 3, endings
    assert all(re.search(NAMED, survivor.stderr) for survivor in survivors), survivors
