"""The conformance suite over real processes, under horovodrun."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from hvd_sparse.errors import ConfigError, PeerLostError, TransportError, TransportTimeout
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from tests.asleep import allreduce, meet
from tests.launch import Controller, horovodrun
from tests.ranks import DYNAMIC_SETS, Ranks, World, with_ranks
from tests.rest import rest
from tests.transports.scenarios import QUICK_SCENARIOS, SCENARIOS, Scenario

SHORT_S = 1.0
"""The timeout that is meant to pass."""

LONG_S = 600.0
"""The timeout where none may pass: longer than the launch is given."""

PROMPT_S = 10.0
"""Within this a rank has to notice what it can notice, on a busy machine too."""


def run_scenarios(transport: Transport, scenarios: Sequence[Scenario]) -> None:
    for scenario in scenarios:
        start = time.monotonic()
        try:
            scenario(transport)
        except BaseException as error:
            raise AssertionError(f"{scenario.__name__} on rank {transport.rank}") from error
        if transport.rank == 0:
            print(f"{scenario.__name__} {time.monotonic() - start:.3f} s", flush=True)


def own_device(name: str) -> None:
    """Gives this rank a CUDA device, where the transport needs one."""
    if name == "nccl":
        torch.cuda.set_device(hvd.local_rank())


def conformance(name: str) -> None:
    """All scenarios; some from a background thread beside dense reductions; a silent rank."""
    own_device(name)
    world = HorovodBootstrap()
    transport = create_transport(name, world, 60.0)
    assert transport.name == name
    run_scenarios(transport, SCENARIOS)
    run_beside_dense_reductions(transport)
    transport.close()
    meet("closed")
    if world.size > 1:
        silent_rank(name, world)


def run_beside_dense_reductions(transport: Transport) -> None:
    failures: list[BaseException] = []

    def background() -> None:
        try:
            for _ in range(3):
                run_scenarios(transport, QUICK_SCENARIOS)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    for step in range(30):
        gradient = torch.full((10_000,), float(hvd.rank() + step))
        mean = allreduce(gradient, f"dense.{step % 5}")
        assert torch.allclose(mean, torch.full((10_000,), (hvd.size() - 1) / 2 + step))
    thread.join(60.0)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def silent_rank(name: str, world: HorovodBootstrap) -> None:
    """The last rank does not answer, for whom the others wait; rank 0 gives up."""
    last = world.size - 1
    busy_timeout_s = SHORT_S if world.rank == 0 else None  # it is alive, and busy elsewhere
    transport = create_transport(name, world, 60.0, busy_timeout_s=busy_timeout_s)
    meet("silent")
    start = time.monotonic()
    error: TransportError | None = None
    if world.rank != last:
        try:
            transport.exchange(None, None, last, channel="silence").wait()
        except TransportError as caught:
            error = caught
        elapsed_s = time.monotonic() - start
        assert elapsed_s < SHORT_S + PROMPT_S, f"{error!r} after {elapsed_s:.2f} s"
        # The others need not wait as long: rank 0 tells them.
        kind = TransportTimeout if world.rank == 0 else PeerLostError
        assert isinstance(error, kind), f"{error!r} after {elapsed_s:.2f} s"
        report(f"{kind.__name__} after {elapsed_s:.2f} s")
        with pytest.raises(kind, match="of no more use"):
            transport.exchange(None, None, 0 if world.rank else last, channel="after")
    meet("heard")
    transport.close()


def peer_dies(name: str) -> None:
    """The last rank ends without a word; each other one waits for its right neighbour."""
    world = HorovodBootstrap()
    transport = create_transport(name, world, LONG_S)
    run_scenarios(transport, QUICK_SCENARIOS[:1])
    status = int(os.environ["TEST_DEATH_STATUS"])
    meet("death")
    if world.rank == world.size - 1:
        report(f"dies at {time.monotonic():.2f}")
        os._exit(status)
    start = time.monotonic()
    try:
        transport.exchange(None, None, world.rank + 1, channel="death").wait()
    except PeerLostError as error:
        report(f"PeerLostError after {time.monotonic() - start:.2f} s: {error}")
    hvd_free_exit()


def peer_leaves(name: str) -> None:
    """The last rank shuts down in order, while the others wait for a message from it."""
    world = HorovodBootstrap()
    transport = create_transport(name, world, LONG_S)
    run_scenarios(transport, QUICK_SCENARIOS[:1])
    meet("leaving")
    if world.rank == world.size - 1:
        report("leaves")
        return
    start = time.monotonic()
    with pytest.raises(PeerLostError):
        transport.exchange(None, None, world.size - 1, channel="left").wait()
    assert time.monotonic() - start < PROMPT_S
    transport.close()
    report("noticed it")


def hvd_free_exit() -> None:
    """Ends without `hvd.shutdown`, which needs all ranks."""
    sys.stdout.flush()
    os._exit(0)


def process_sets(name: str) -> None:
    """Even and odd ranks at the same time, each in a world of their own."""
    own_device(name)
    sets = [hvd.add_process_set(list(range(start, hvd.size(), 2))) for start in range(2)]
    world = HorovodBootstrap(sets[hvd.rank() % 2])
    assert world.ranks == list(range(hvd.rank() % 2, hvd.size(), 2))
    assert world.rank == hvd.rank() // 2
    transport = create_transport(name, world, 60.0)
    assert transport.world_size == world.size
    assert transport.rank == world.rank
    meet("sets")
    gathered = transport.allgather((torch.tensor([hvd.rank()]),), channel="ranks")
    assert [part.view(torch.int64).item() for part in gathered] == world.ranks
    run_scenarios(transport, QUICK_SCENARIOS)
    with pytest.raises(ConfigError, match="not in the process set"):
        HorovodBootstrap(sets[1 - hvd.rank() % 2])
    transport.close()
    for process_set in sets:
        hvd.remove_process_set(process_set)


def refused(name: str) -> None:
    """The choice is impossible, and every rank is told why."""
    try:
        create_transport(name, HorovodBootstrap(), 30.0)
    except ConfigError as error:
        report(f"ConfigError: {error}")
    else:
        raise AssertionError(f"{name} was taken")


def chosen(name: str) -> None:
    """Says which transport a choice leads to, over which address, and tries it."""
    transport = create_transport(name, HorovodBootstrap(), 30.0)
    report(f"chose {transport.name} at {getattr(transport, 'host', 'no address')}")
    run_scenarios(transport, QUICK_SCENARIOS)
    transport.close()
    report("all scenarios passed")


def report(text: str) -> None:
    # One write: mpirun may break a line between two.
    sys.stdout.write(f"rank {hvd.rank()}: {text}\n")
    sys.stdout.flush()


pytestmark = pytest.mark.timeout(240)

WORLDS = [1, 2, 3, 4, 7]
LAUNCHED = [("gloo", "gloo"), ("mpi", "mpi"), pytest.param("gloo", "mpi", marks=rest)]
"""Transports and Horovod's controllers."""
UNDER_MPI = pytest.mark.parametrize("name", ["mpi", pytest.param("gloo", marks=rest)])


@with_ranks(*(World(P) for P in WORLDS))
def test_conformance(ranks: Ranks) -> None:
    ranks.run(conformance, "gloo", timeout=200.0)


@with_ranks(*(World(P, "mpi") for P in WORLDS[:-1]))
@UNDER_MPI
def test_conformance_under_mpi(ranks: Ranks, name: str) -> None:
    ranks.run(conformance, name, timeout=200.0)


@rest
@with_ranks(World(WORLDS[-1], "mpi"))
def test_conformance_of_mpi_on_many_ranks(ranks: Ranks) -> None:
    ranks.run(conformance, "mpi", timeout=200.0)


@with_ranks(World(5, env=DYNAMIC_SETS))
def test_process_sets(ranks: Ranks) -> None:
    ranks.run(process_sets, "gloo")


@with_ranks(World(5, "mpi", env=DYNAMIC_SETS))
@UNDER_MPI
def test_process_sets_under_mpi(ranks: Ranks, name: str) -> None:
    ranks.run(process_sets, name)


@with_ranks(World(2))
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mpi", r"'mpi' is impossible: on rank 0, the processes were not started by MPI"),
        ("ucc", r"must be one of auto, gloo, mpi, nccl: 'ucc'"),
    ],
)
def test_impossible_choices_are_refused(ranks: Ranks, name: str, reason: str) -> None:
    for rank in ranks.run(refused, name):
        assert re.search(f"ConfigError: .*{reason}", rank.output), rank.output


@with_ranks(World(2, "mpi"))
def test_threads_are_refused_among_processes(ranks: Ranks) -> None:
    for rank in ranks.run(refused, "local"):
        assert "must be one of auto, gloo, mpi, nccl: 'local'" in rank.output


@with_ranks(World(2))
def test_the_choice(ranks: Ranks) -> None:
    for rank in ranks.run(chosen, "auto"):
        assert "chose gloo " in rank.output


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
