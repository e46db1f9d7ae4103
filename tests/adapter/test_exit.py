"""However a rank ends between `backward()` and `step()`, its processes end as Python's would, soon.

That is: by their own exit status and with their own traceback, never by std::terminate (status
134), and not later than a peer's silence and Horovod's own end allow for.
"""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.endings import Ending, endings_in
from tests.launch import WORKERS, horovodrun, launch_environment
from tests.rest import ALL

pytestmark = pytest.mark.launches

TIMEOUT_S = 5.0
EXIT_S = 10.0
"""What a process may take to end, beyond the timeout."""


def endings_of(cases: list[str]) -> dict[str, list[Ending]]:
    """Of cases one after the other, from one process: it imports what they need once."""
    done = subprocess.run(
        [sys.executable, str(WORKERS / "adapter_exits.py"), *cases],
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return endings_in(done.stdout)


@pytest.fixture(scope="module")
def under_gloo() -> dict[str, list[Ending]]:
    """All cases, two at a time: most of the time they wait."""
    cases = ["nothing", "raise", "raise_everywhere", "exit", "interrupt", "terminate", "stop"]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(endings_of, (cases[::2], cases[1::2]))
    endings = {case: each for share in found for case, each in share.items()}
    assert {case: len(found) for case, found in endings.items()} == dict.fromkeys(cases, 3)
    return endings


def assert_in_time(endings: list[Ending], clean: list[Ending]) -> None:
    """Within the bound, and the time that a clean end of the same world takes on this machine."""
    clean_s = max(ending.seconds for ending in clean)
    for rank, ending in enumerate(endings):
        assert not math.isnan(ending.seconds), (rank, ending)
        assert ending.seconds < TIMEOUT_S + EXIT_S + clean_s, (rank, ending)


@pytest.mark.timeout(600)
def test_a_job_that_only_ends_ends_with_status_0(under_gloo: dict[str, list[Ending]]) -> None:
    assert [ending.code for ending in under_gloo["nothing"]] == [0, 0, 0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "code", "last_words"),
    [
        ("raise", 1, "ValueError: a failure of the script's own"),
        ("exit", 7, ""),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("terminate", -signal.SIGTERM, ""),
    ],
)
def test_a_rank_that_fails_ends_by_its_own_failure(
    under_gloo: dict[str, list[Ending]], case: str, code: int, last_words: str
) -> None:
    failed = under_gloo[case][1]
    assert failed.code == code, failed
    assert last_words in failed.stderr
    for peer in (under_gloo[case][0], under_gloo[case][2]):
        assert peer.code in (0, 1), peer  # 0: it was through with this last step
        if last_words and peer.code:  # it could still tell why
            assert f"rank 1 aborted the transport: {last_words[:10]}" in peer.stderr, peer
    assert_in_time(under_gloo[case], under_gloo["nothing"])


@pytest.mark.timeout(600)
def test_ranks_that_all_fail_do_so_too(under_gloo: dict[str, list[Ending]]) -> None:
    for ending in under_gloo["raise_everywhere"]:
        assert ending.code == 1, ending
        assert "ValueError: a failure of the script's own" in ending.stderr
    assert_in_time(under_gloo["raise_everywhere"], under_gloo["nothing"])


def assert_left_the_stopped_rank(endings: list[Ending]) -> None:
    """Its peers name it, and do not wait for Horovod, which waits for it."""
    for peer in (endings[0], endings[2]):
        assert peer.code == 1, peer
        assert "hvd_sparse.errors." in peer.stderr  # the first cause,
        assert "HorovodInternalError: hvd_sparse: " in peer.stderr  # chained
    assert any("rank 1" in peer.stderr for peer in (endings[0], endings[2]))
    assert endings[1].code == -signal.SIGKILL  # by the test, in the end


@pytest.mark.timeout(600)
def test_peers_of_a_stopped_rank_leave(under_gloo: dict[str, list[Ending]]) -> None:
    endings = under_gloo["stop"]
    assert_left_the_stopped_rank(endings)
    assert_in_time([endings[0], endings[2]], under_gloo["nothing"])


@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_under_mpi(tmp_path: Path) -> None:
    """MPI itself is for one life only, so each case is a launch; most of the time they wait."""

    def ended(case: str) -> list[Ending]:
        done = horovodrun(
            3, "adapter_exits.py", case, tmp_path / case, controller="mpi", timeout=190, check=False
        )
        # Not from the standard output, where mpirun mixes the lines of ranks.
        reports = "".join(file.read_text() for file in (tmp_path / case).glob("report.*"))
        found = endings_in(reports).get(case, [])
        assert len(found) == 3, done.stdout + done.stderr
        return found

    cases = ("nothing", "raise", "stop") if ALL else ("nothing", "stop")
    with ThreadPoolExecutor(2) as pool:
        endings = dict(zip(cases, pool.map(ended, cases), strict=True))
    assert [ending.code for ending in endings["nothing"]] == [0, 0, 0]
    if ALL:
        assert endings["raise"][1].code == 1
        assert "ValueError: a failure of the script's own" in endings["raise"][1].stderr
        assert_in_time(endings["raise"], endings["nothing"])
    assert_left_the_stopped_rank(endings["stop"])
    assert_in_time([endings["stop"][0], endings["stop"][2]], endings["nothing"])
