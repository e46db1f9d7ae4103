"""The bounds that docs/reliability.md promises: each row's fault, its error and its seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_sparse.errors import HvdSparseError
from hvd_sparse.transports import connect
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from hvd_sparse.transports.gloo import take_nothing
from tests.launch import REPOSITORY, horovodrun
from tests.rest import rest
from tests.transports.pairs import PairWorld, borrowed, run_pair

T, B = 3.0, 7.0
P = min(1.0, T / 5)
SLACK_S = 5.0
"""What a busy machine may add."""

MEDIA = {"gloo": 2, "MPI": 3}
"""The columns of the table."""


class Sent:
    """A send whose message is lost."""

    def wait(self, deadline: float) -> None:
        return None


def stop_for(seconds: float) -> None:
    """Stops this process, as a hang of its host would."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def die(*arguments: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_messages(t: Any) -> None:
    t._isend = lambda *message: Sent()
    t.exchange((torch.ones(1),), 0, None, channel="c").wait()
    time.sleep(B + 3.0)


def drop_packets(t: Any) -> None:
    with borrowed(t._sockets.connected) as connections:
        for connection in connections:
            take_nothing(connection)


def send_in_vain(t: Any) -> None:
    drop_packets(t)
    try:
        t.exchange((torch.ones(1),), 0, None, channel="c").wait()
    except HvdSparseError as error:
        print(f"rank 1 says: {error}")


DROPPED = "the network drops the exchange's connection"
FAULTS: dict[str, Callable[[Any], object]] = {
    "its peer raises an error": lambda t: t.abort(ValueError("of rank 1")),
    "its peer is busy for longer than B": lambda t: time.sleep(B + 3.0),
    "a message is lost": lose_messages,
    DROPPED: send_in_vain,
    "its peer is stopped for less than T": lambda t: (
        stop_for(T / 2),
        t.exchange((torch.ones(1),), 0, None, channel="c").wait(),
    ),
    "its peer is stopped": lambda t: stop_for(T + 4.0),
    "its peer's process is killed": die,
}
"""What rank 1 does, while rank 0 waits for its message."""

BETWEEN = "its peer's process was killed between two exchanges"
CONNECTING = "its peer dies while they connect"
ENDS = ("its peer's process is killed", BETWEEN, CONNECTING)
LAUNCHER = "the launcher ends the job"


def table() -> dict[str, list[str]]:
    """The rows of the table, by fault."""
    text = Path(REPOSITORY / "docs/reliability.md").read_text()
    _, _, rows = text.partition("| fault | what the other worker raises |")
    rows = rows.partition("\n\n")[0]
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in rows.split("\n")[2:]]
    return {fault: [fault, *others] for fault, *others in cells}


def promised(fault: str, medium: str) -> float | None:
    """Seconds; None where the launcher ends all."""
    row = table()[fault]
    cell = row[MEDIA["gloo"] if row[MEDIA[medium]] == "the same" else MEDIA[medium]]
    if cell == LAUNCHER:
        return None
    assert re.fullmatch(r"`[TBPmax\d+*,(). ]+`", cell), cell
    return float(eval(cell.strip("`"), {"T": T, "B": B, "P": P, "max": max}))


def tried(world: HorovodBootstrap, name: str, fault: str, meet: Callable[[], object]) -> None:
    """Rank 1 has the fault, rank 0 waits and reports."""
    if fault == CONNECTING and world.rank == 1:
        connect.connect_lines = die
    start, error = time.monotonic(), ""
    try:
        transport = create_transport(name, world, T, busy_timeout_s=B)
        transport.allreduce_sum(torch.ones(1), channel="c")
        meet()
        start = time.monotonic()
        if world.rank == 1:
            FAULTS.get(fault, die)(transport)
        else:
            if fault == DROPPED:
                drop_packets(transport)  # those for either end
            if fault == BETWEEN:
                time.sleep(2.0)
                start = time.monotonic()
            transport.exchange(None, None, 1, channel="c").wait()
    except HvdSparseError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if world.rank == 0:
        print(f"{time.monotonic() - start:.2f} s for {fault}: {error}", flush=True)
    if fault not in ENDS:
        meet()
        transport.close()


def in_a_pair(world: PairWorld, *faults: str) -> None:
    for fault in faults:
        tried(world, "gloo", fault, world.meet)


def under_mpi(*faults: str) -> None:
    import horovod.torch as hvd

    from tests.asleep import meet

    world = HorovodBootstrap()
    for fault in faults:
        tried(world, "mpi", fault, lambda: meet("fault"))
    assert hvd.size() == 2
    os._exit(0)  # a stopped rank's shutdown may come late


pytestmark = [pytest.mark.launches, pytest.mark.slow, pytest.mark.timeout(300)]


def check(medium: str, faults: list[str], said: str) -> None:
    """Compares what rank 0 has said of each fault with the table."""
    for fault in faults:
        bound_s, raised = promised(fault, medium), table()[fault][1]
        found = re.search(rf"([\d.]+) s for {re.escape(fault)}: (.*)", said)
        assert found is not None, said
        seconds, error = float(found[1]), found[2]
        print(f"{medium}: {fault}: {seconds:.1f} s, promised {bound_s}")
        assert bound_s is not None
        if raised == "nothing":
            assert not error, said
            continue
        kinds, _, words = raised.partition(": ")
        assert error.partition(":")[0] in re.findall(r"`(\w+)`", kinds), error
        assert any(some in error for some in re.split(", (?:or )?", words)), error
        assert seconds <= bound_s + SLACK_S, error


def test_the_table_has_each_fault_and_no_other() -> None:
    assert sorted(table()) == sorted([*FAULTS, BETWEEN, CONNECTING])


@pytest.mark.parametrize("last", ENDS)
def test_bounds_over_gloo(last: str) -> None:
    faults = [*([fault for fault in FAULTS if fault not in ENDS] if last == ENDS[0] else []), last]
    check("gloo", faults, run_pair(in_a_pair, *faults, limit_s=150)[0])


@rest
def test_bounds_under_mpi() -> None:
    faults = [
        fault for fault in FAULTS if promised(fault, "MPI") is not None and fault != DROPPED
    ]  # gloo's sockets are the exchange's there
    done = horovodrun(2, under_mpi, *faults, controller="mpi", timeout=200, check=False)
    check("MPI", faults, re.sub(r"\[[\d,]+\]<std\w+>:", "", done.stdout + done.stderr))
