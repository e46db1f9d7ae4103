"""The conformance suite over real processes, under horovodrun."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.launch import Controller, horovodrun
from tests.ranks import DYNAMIC_SETS, Ranks, World, with_ranks
from tests.rest import rest
from tests.workers.transport_worker import (
    chosen,
    conformance,
    peer_dies,
    peer_leaves,
    process_sets,
    refused,
)

pytestmark = pytest.mark.timeout(240)

WORLDS = [1, 2, 3, 4, 7]
TRANSPORTS: list[tuple[str, Controller]] = [
    ("gloo", "gloo"),
    ("gloo", "mpi"),
    ("mpi", "mpi"),
    ("horovod", "gloo"),
    ("horovod", "mpi"),
]
ONE_EACH = [("gloo", "gloo"), ("mpi", "mpi"), ("horovod", "gloo")]
LAUNCHED = [case if case in ONE_EACH else pytest.param(*case, marks=rest) for case in TRANSPORTS]
"""Where each case is a launch."""

UNDER_GLOO, UNDER_MPI = (
    pytest.mark.parametrize("name", [name for name, under in TRANSPORTS if under == controller])
    for controller in ("gloo", "mpi")
)


@with_ranks(*(World(P) for P in WORLDS))
@UNDER_GLOO
def test_conformance(ranks: Ranks, name: str) -> None:
    ranks.run(conformance, name, timeout=200.0)


@with_ranks(*(World(P, "mpi") for P in WORLDS[:-1]))
@UNDER_MPI
def test_conformance_under_mpi(ranks: Ranks, name: str) -> None:
    ranks.run(conformance, name, timeout=200.0)


@with_ranks(World(WORLDS[-1], "mpi"))
def test_conformance_of_mpi_on_many_ranks(ranks: Ranks) -> None:
    ranks.run(conformance, "mpi", timeout=200.0)


@with_ranks(World(5, env=DYNAMIC_SETS))
@UNDER_GLOO
def test_process_sets(ranks: Ranks, name: str) -> None:
    ranks.run(process_sets, name)


@with_ranks(World(5, "mpi", env=DYNAMIC_SETS))
@UNDER_MPI
def test_process_sets_under_mpi(ranks: Ranks, name: str) -> None:
    ranks.run(process_sets, name)


@with_ranks(World(2))
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mpi", r"'mpi' is impossible: on rank 0, the processes were not started by MPI"),
        ("ucc", r"must be one of auto, gloo, mpi, nccl, horovod: 'ucc'"),
    ],
)
def test_impossible_choices_are_refused(ranks: Ranks, name: str, reason: str) -> None:
    for rank in ranks.run(refused, name):
        assert re.search(f"ConfigError: .*{reason}", rank.output), rank.output


@with_ranks(World(2, "mpi"))
def test_threads_are_refused_among_processes(ranks: Ranks) -> None:
    for rank in ranks.run(refused, "local"):
        assert "'local' connects threads of one process" in rank.output


@with_ranks(World(2))
@pytest.mark.parametrize(("variable", "expected"), [("", "gloo"), ("horovod", "horovod")])
def test_the_choice(ranks: Ranks, variable: str, expected: str) -> None:
    for rank in ranks.run(chosen, "auto", env={"HVD_SPARSE_TRANSPORT": variable}):
        assert f"chose {expected} " in rank.output


@with_ranks(World(2, "mpi"))
@pytest.mark.parametrize(("variable", "expected"), [("", "mpi"), ("gloo", "gloo")])
def test_the_choice_under_mpi(ranks: Ranks, variable: str, expected: str) -> None:
    for rank in ranks.run(chosen, "auto", env={"HVD_SPARSE_TRANSPORT": variable}):
        assert f"chose {expected} " in rank.output


def launch(
    world_size: int,
    name: str,
    scenario: Callable[[str], None],
    controller: Controller,
    **options: Any,
) -> tuple[str, int]:
    """The output of all ranks without the launcher's marks, and the exit status."""
    done = horovodrun(world_size, scenario, name, controller=controller, timeout=200.0, **options)
    return re.sub(r"\[[\d,]+\]<std\w+>:", "", done.stdout) + done.stderr, done.returncode


@pytest.mark.launches
def test_survivors_of_a_death_know_at_once_over_gloo() -> None:
    # Status 0: the launcher takes no notice, and the survivors are left to themselves.
    output, status = launch(4, "gloo", peer_dies, "gloo", env={"TEST_DEATH_STATUS": "0"})
    times = [float(t) for t in re.findall(r"rank [0-2]: PeerLostError after ([\d.]+) s", output)]
    assert len(times) == 3, output
    assert max(times) < 10.0, output
    assert status == 0


@pytest.mark.launches
@pytest.mark.parametrize(("name", "controller"), LAUNCHED)
def test_a_death_ends_the_job(name: str, controller: Controller) -> None:
    env = {"TEST_DEATH_STATUS": "3"}
    output, status = launch(3, name, peer_dies, controller, env=env, check=False)
    assert status != 0, output
    died = re.search(r"dies at ([\d.]+)", output)
    assert died is not None, output
    assert time.monotonic() - float(died[1]) < 90.0, output  # far below the transport's timeout


@pytest.mark.launches
@pytest.mark.parametrize(("name", "controller"), LAUNCHED)
def test_a_peer_that_shuts_down_is_noticed(name: str, controller: Controller) -> None:
    output, _ = launch(3, name, peer_leaves, controller)
    assert output.count("noticed it") == 2, output
