"""The conformance suite over real processes, under the unmodified horovodrun."""

from __future__ import annotations

import re
import time

import pytest

from tests.launch import Controller, horovodrun

pytestmark = pytest.mark.timeout(240)

WORLDS = [1, 2, 3, 4, 7]
TRANSPORTS: list[tuple[str, Controller]] = [
    ("gloo", "gloo"),
    ("gloo", "mpi"),
    ("mpi", "mpi"),
    ("horovod", "gloo"),
    ("horovod", "mpi"),
]
WORKER = "transport_worker.py"


def launch(
    world_size: int,
    name: str,
    mode: str,
    controller: Controller,
    *,
    env: dict[str, str] | None = None,
    timeout: float = 200.0,
    check: bool = True,
) -> tuple[str, int]:
    """The output of all ranks without the launcher's marks, and the exit status."""
    done = horovodrun(
        world_size, WORKER, name, mode, controller=controller, env=env, timeout=timeout, check=check
    )
    return re.sub(r"\[[\d,]+\]<std\w+>:", "", done.stdout) + done.stderr, done.returncode


def passed(output: str, mode: str) -> int:
    return len(re.findall(rf": {mode} over \w+ passed", output))


@pytest.mark.parametrize(("name", "controller"), TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_conformance(world_size: int, name: str, controller: Controller) -> None:
    output, _ = launch(world_size, name, "conformance", controller)
    assert passed(output, "conformance") == world_size, output


@pytest.mark.parametrize(("name", "controller"), TRANSPORTS)
def test_process_sets(name: str, controller: Controller) -> None:
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    output, _ = launch(5, name, "process_sets", controller, env=env)
    assert passed(output, "process_sets") == 5, output


def test_survivors_of_a_death_know_at_once_over_gloo() -> None:
    # Status 0: the launcher takes no notice, and the survivors are left to themselves.
    output, status = launch(4, "gloo", "peer_dies", "gloo", env={"TEST_DEATH_STATUS": "0"})
    times = [float(t) for t in re.findall(r"rank [0-2]: PeerLostError after ([\d.]+) s", output)]
    assert len(times) == 3, output
    assert max(times) < 10.0, output
    assert status == 0


@pytest.mark.parametrize(("name", "controller"), TRANSPORTS)
def test_a_death_ends_the_job(name: str, controller: Controller) -> None:
    env = {"TEST_DEATH_STATUS": "3"}
    output, status = launch(3, name, "peer_dies", controller, env=env, check=False)
    assert status != 0, output
    died = re.search(r"dies at ([\d.]+)", output)
    assert died is not None, output
    assert time.monotonic() - float(died[1]) < 90.0, output  # far below the transport's timeout


@pytest.mark.parametrize(("name", "controller"), TRANSPORTS)
def test_a_peer_that_shuts_down_is_noticed(name: str, controller: Controller) -> None:
    output, _ = launch(3, name, "peer_leaves", controller)
    assert passed(output, "peer_leaves") == 3, output


@pytest.mark.parametrize(
    ("name", "controller", "reason"),
    [
        ("mpi", "gloo", r"'mpi' is impossible: on rank 0, the processes were not started by MPI"),
        ("ucc", "gloo", r"must be one of auto, gloo, mpi, nccl, horovod: 'ucc'"),
        ("local", "mpi", r"'local' connects threads of one process"),
    ],
)
def test_impossible_choices_are_refused(name: str, controller: Controller, reason: str) -> None:
    output, _ = launch(2, name, "refused", controller)
    assert len(re.findall(f"ConfigError: .*{reason}", output)) == 2, output


@pytest.mark.parametrize(
    ("controller", "variable", "expected"),
    [("gloo", "", "gloo"), ("mpi", "", "mpi"), ("mpi", "gloo", "gloo"), ("gloo", "horovod", "hor")],
)
def test_the_choice(controller: Controller, variable: str, expected: str) -> None:
    env = {"HVD_SPARSE_TRANSPORT": variable}
    output, _ = launch(2, "auto", "chosen", controller, env=env)
    assert len(re.findall(f"chose {expected}", output)) == 2, output
    assert passed(output, "chosen") == 2, output
