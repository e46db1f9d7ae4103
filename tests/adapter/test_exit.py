"""However a rank ends between `backward()` and `step()`, its processes end as Python's would, soon.

That is: by their own exit status and with their own traceback, never by std::terminate (status
134), and not later than a peer's silence and Horovod's own end allow for.
"""

from __future__ import annotations

import atexit
import gc
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer
from torch import nn

from hvd_sparse import Compression, sparse_allreduce_async
from tests.endings import Ending, endings_in
from tests.launch import TESTS, horovodrun, launch_environment
from tests.lean import start_lean
from tests.rest import ALL

WORLD_SIZE = 3
FAILING = 1
STEPS = 4
TIMEOUT_S = 5.0
LIMIT_S = 60.0
LATE_S = 2.0
LINGER_S = 4.0
HANDLER_S = 9.0
"""What an exit handler of the script's takes: longer than Horovod's end may."""


class Lingers:
    """Prolongs the interpreter's end.

    Peers come late to the failing step, in which the failing rank already waits for their messages.
    These come after its interpreter has begun to end: a thread that still waits is ended by Python
    when it comes back from native code.
    """

    def __del__(self, sleep: Callable[[float], None] = time.sleep, for_s: float = LINGER_S) -> None:
        sleep(for_s)


until_the_end: list[Lingers] = []


def fail() -> None:
    raise ValueError("a failure of the script's own")


def call_alone() -> Any:
    """A call that waits for all ranks, in a thread of its own."""
    return sparse_allreduce_async(torch.eye(3).to_sparse())


CASES: Mapping[str, tuple[bool, Callable[[], object]]] = {
    "nothing": (False, lambda: None),
    "raise": (False, fail),
    "raise_everywhere": (True, fail),
    "exit": (False, lambda: sys.exit(7)),
    "interrupt": (False, lambda: os.kill(os.getpid(), signal.SIGINT)),
    "terminate": (False, lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "kill": (False, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stop": (False, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "raise_in_a_call": (False, lambda: (call_alone(), fail())),
    "handlers": (False, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "fork": (False, lambda: None),
    "raise_beside_a_stop": (False, fail),
}
"""By name: whether all ranks fail, or only one; and how."""


def train(case: str, failed_at: Path) -> None:
    """Train for some steps, and fail after the last `backward()`."""
    everywhere, failure = CASES[case]
    handlers = [partial(handler, where) for where in ("before init", "before a step", "after")]
    if case == "handlers":
        atexit.register(handlers[0], 0.0)
    hvd.init()
    if case == "handlers":
        atexit.register(handlers[1], HANDLER_S, hvd.rank)
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=Compression.topk(
            # A bucket for each layer: the first one is sent before Horovod refuses to go on.
            model.named_parameters(),
            bucket_numel=1 << 20,
            timeout_s=TIMEOUT_S,
        ),
    )
    for step in range(STEPS):
        model.zero_grad()
        if case == "raise_in_a_call" and step == 0:
            [call_alone().wait() for _ in range(2)]  # all ranks do: two connections
        if step == 1 and case == "handlers":
            atexit.register(handlers[2], 0.0, hvd.rank)
        if case == "fork" and hvd.rank() == FAILING:
            end_children(optimizer)  # before the first step there are no connections yet
        if case == "raise_beside_a_stop" and step == STEPS - 1 and hvd.rank() > 0:
            fail_outside_of_an_exchange(failed_at)
        if step == STEPS - 1 and not everywhere and hvd.rank() != FAILING:
            time.sleep(LATE_S)
        model(torch.randn(4, 1024)).square().mean().backward()
        if step == STEPS - 1 and (everywhere or hvd.rank() == FAILING):
            if everywhere:
                hvd.barrier()  # else the first to fail would end a slow one's backward
            until_the_end.append(Lingers())
            failed_at.write_text(str(time.time()))
            failure()
            if case == "fork":
                end_children(optimizer)
        optimizer.step()


def handler(where: str, for_s: float, rank: Callable[[], int] = lambda: -1) -> None:
    time.sleep(for_s)
    print(f"the handler registered {where} ran on rank {rank()}", file=sys.stderr)


def fail_outside_of_an_exchange(failed_at: Path) -> None:
    """Rank 2 stops; then rank 1 raises, which waits for nobody."""
    if hvd.rank() != FAILING:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LATE_S)
    failed_at.write_text(str(time.time()))
    fail()


def end_children(optimizer: Any) -> None:
    """Children that are forked, and end by an exception, or drop what is their parent's."""
    raising = multiprocessing.get_context("fork").Process(target=fail)
    raising.start()
    raising.join()
    child = os.fork()
    if child == 0:
        optimizer._compression.stats()
        optimizer._compression = optimizer.synchronize = optimizer._allreduce_grad_async = None
        gc.collect()
        fail()
    deadline = time.monotonic() + LIMIT_S / 2
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended[0] == child, "the child hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 1


Train = Callable[[str, Path], object]
"""Trains by the name of a case, and writes into the file when it fails."""


def start(
    case: str, failed_at: Path, environment: Mapping[str, str], train: Train
) -> tuple[int, Path]:
    """Fork a rank; its process and what it writes on stderr. Returns in this process only."""
    errors = failed_at.with_name(f"stderr.{environment.get('HOROVOD_RANK', '')}")
    child = os.fork()
    if child:
        return child, errors
    os.environ.update(environment)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    train(case, failed_at)
    sys.exit()  # by way of the interpreter's own end


def watch(case: str, ranks: Mapping[int, tuple[int, Path]], failed_at: Path) -> None:
    """Report each rank's end; what has not ended by the limit, or is stopped, is killed."""
    running = dict(ranks)
    limit = math.inf
    while running:
        for rank, (child, errors) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if ended == 0:
                continue
            if os.WIFSTOPPED(status):
                continue
            del running[rank]
            failed_at.with_name(f"ended.{rank}").touch()
            since = time.time() - float(failed_at.read_text() if failed_at.exists() else "nan")
            report = json.dumps(
                {
                    "case": case,
                    "rank": rank,
                    "code": os.waitstatus_to_exitcode(status),
                    "seconds": since,
                    "stderr": errors.read_text()[-20_000:],
                }
            )
            failed_at.with_name(f"report.{rank}").write_text(report)
            print(report, flush=True)
        if limit == math.inf and failed_at.exists():
            limit = time.monotonic() + LIMIT_S
        stopped = 2 if case.endswith("beside_a_stop") else FAILING
        others = [r for r in range(WORLD_SIZE) if r != stopped]
        others_ended = all(failed_at.with_name(f"ended.{r}").exists() for r in others)
        if (case.endswith("stop") and others_ended) or time.monotonic() > limit:
            for child, _ in running.values():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def run_world(case: str, train: Train) -> None:
    """Three ranks under gloo, started as `horovodrun` starts them."""
    rendezvous = RendezvousServer(verbose=0)
    port = rendezvous.start()
    slots = get_host_assignments(parse_hosts(f"localhost:{WORLD_SIZE}"), WORLD_SIZE)
    rendezvous.init(slots)
    failed_at = Path(tempfile.mkdtemp()) / "failed_at"
    common = {key: str(v) for key, v in create_run_env_vars("127.0.0.1", ["lo"], port).items()}
    ranks = {
        slot.rank: start(case, failed_at, {**common, **create_slot_env_vars(slot)}, train)
        for slot in slots
    }
    watch(case, ranks, failed_at)
    rendezvous.stop()


def main(train: Train, prepare: Callable[[], None] = start_lean) -> None:
    cases = sys.argv[1:]
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    prepare()
    if rank is None:
        for case in cases:
            run_world(case, train)
    else:
        folder = Path(cases[1])
        folder.mkdir(exist_ok=True)
        failed_at = folder / "failed_at"
        child = start(cases[0], failed_at, {"HOROVOD_RANK": rank}, train)
        watch(cases[0], {int(rank): child}, failed_at)


pytestmark = pytest.mark.launches

EXIT_S = 10.0
"""What a process may take to end, beyond the timeout."""


def endings_of(cases: list[str]) -> dict[str, list[Ending]]:
    """Of cases one after the other, from one process: it imports what they need once."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "adapter/test_exit.py"), *cases],
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
    cases += ["raise_in_a_call", "handlers", "fork", "raise_beside_a_stop"]
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
        ("raise_in_a_call", 1, "ValueError: a failure of the script's own"),
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


def assert_ended_beside_the_stopped_rank(endings: list[Ending], clean: list[Ending]) -> None:
    """The rank that raises waits for nobody but Horovod, which waits for the stopped one."""
    peer, failed, _ = endings
    assert failed.code == peer.code == 1, endings
    assert "ValueError: a failure of the script's own" in failed.stderr
    assert "rank 1 aborted the transport: ValueError" in peer.stderr
    assert_in_time([peer, failed], clean)


@pytest.mark.timeout(600)
def test_a_failure_beside_a_stopped_rank_ends_soon(under_gloo: dict[str, list[Ending]]) -> None:
    assert_ended_beside_the_stopped_rank(under_gloo["raise_beside_a_stop"], under_gloo["nothing"])


@pytest.mark.timeout(600)
def test_exit_handlers_of_the_script_run_to_their_end(
    under_gloo: dict[str, list[Ending]],
) -> None:
    for rank in (0, 2):
        ending = under_gloo["handlers"][rank]
        ran = re.findall(r"the handler registered (.*) ran on rank (-?\d)", ending.stderr)
        wanted = [("after", str(rank)), ("before a step", str(rank)), ("before init", "-1")]
        assert ran == wanted, ending
        assert ending.seconds < HANDLER_S + TIMEOUT_S + EXIT_S + under_gloo["nothing"][0].seconds


@pytest.mark.timeout(600)
def test_a_forked_child_ends_nothing_but_itself(under_gloo: dict[str, list[Ending]]) -> None:
    assert_children_ended_alone(under_gloo["fork"])


def assert_children_ended_alone(endings: list[Ending]) -> None:
    assert [ending.code for ending in endings] == [0, 0, 0], endings
    assert endings[1].stderr.count("ValueError: a failure") == 2 * (STEPS + 1), endings[1]
    assert "Error" not in endings[0].stderr, endings[0]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_under_mpi(tmp_path: Path) -> None:
    """MPI itself is for one life only, so each case is a launch; most of the time they wait."""

    def ended(case: str) -> list[Ending]:
        done = horovodrun(
            3,
            "adapter/test_exit.py",
            case,
            tmp_path / case,
            controller="mpi",
            timeout=190,
            check=False,
        )
        # Not from the standard output, where mpirun mixes the lines of ranks.
        reports = "".join(file.read_text() for file in (tmp_path / case).glob("report.*"))
        found = endings_in(reports).get(case, [])
        assert len(found) == 3, done.stdout + done.stderr
        return found

    cases = ["nothing", "stop"] + ["raise", "fork", "raise_beside_a_stop"] * ALL
    with ThreadPoolExecutor(2) as pool:
        endings = dict(zip(cases, pool.map(ended, cases), strict=True))
    assert [ending.code for ending in endings["nothing"]] == [0, 0, 0]
    if ALL:
        assert endings["raise"][1].code == 1
        assert "ValueError: a failure of the script's own" in endings["raise"][1].stderr
        assert_in_time(endings["raise"], endings["nothing"])
        assert_children_ended_alone(endings["fork"])
        assert_ended_beside_the_stopped_rank(endings["raise_beside_a_stop"], endings["nothing"])
    assert_left_the_stopped_rank(endings["stop"])
    assert_in_time([endings["stop"][0], endings["stop"][2]], endings["nothing"])


if __name__ == "__main__":
    main(train)
