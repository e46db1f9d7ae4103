"""Connecting: releases, the choice of a transport, and gloo, with threads as ranks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_sparse.errors import ConfigError, PlanError
from hvd_sparse.transports import LocalTransport, Transport, run_ranks
from hvd_sparse.transports.connect import (
    PROTOCOL,
    Capability,
    check_releases,
    create_transport,
    decide,
)
from hvd_sparse.transports.meeting import HostReport
from tests.transports.failures import aborts_from_another_thread
from tests.transports.scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.timeout(60)

NO_MPI = "mpi4py cannot be imported"
NO_CUDA = "torch sees no CUDA device"


class ThreadBootstrap:
    """A world of threads that look like processes which MPI did not start."""

    mpi_enabled = False
    process_set = None

    def __init__(self, transport: LocalTransport) -> None:
        self.rank, self.size = transport.rank, transport.world_size
        self.ranks = list(range(self.size))
        self._transport = transport

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        del timeout_s
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        parts = self._transport.allgather((data,), channel=name)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]


def over_gloo(
    world_size: int,
    fn: Callable[[Transport], Any],
    timeout_s: float | list[float] = 20.0,
    busy_timeout_s: float | None = None,
) -> list[Any]:
    timeouts = [timeout_s] * world_size if isinstance(timeout_s, float) else timeout_s

    def rank(local: LocalTransport) -> Any:
        transport = create_transport(
            "gloo", ThreadBootstrap(local), timeouts[local.rank], busy_timeout_s=busy_timeout_s
        )
        try:
            return fn(transport)
        finally:
            transport.close()

    return run_ranks(world_size, rank, timeout_s=30.0, limit_s=50.0)


def capability(
    requested: str = "auto",
    mpi_problem: str | None = None,
    source: str = "transport",
    nccl_problem: str | None = NO_CUDA,
    device: str | None = None,
) -> Capability:
    return Capability(requested, source, mpi_problem, HostReport("host", ()), nccl_problem, device)


def on_devices(*devices: str, requested: str = "auto") -> list[Capability]:
    return [capability(requested, nccl_problem=None, device=device) for device in devices]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ([capability()] * 2, "mpi"),
        ([capability(), capability(mpi_problem=NO_MPI)], "gloo"),
        ([capability(mpi_problem=NO_MPI)] * 3, "gloo"),
        ([capability()], "local"),
        ([capability("gloo")] * 2, "gloo"),
        ([capability("gloo")], "gloo"),
        ([capability("mpi")] * 2, "mpi"),
        (on_devices("a", "b"), "mpi"),
        (on_devices("a", "b", requested="nccl"), "nccl"),
        (on_devices("a", requested="nccl"), "nccl"),
        (on_devices("a"), "local"),
        (on_devices("a", "b", "a"), "mpi"),
        ([*on_devices("a", "b"), capability()], "mpi"),
    ],
)
def test_decisions(every: list[Capability], expected: str) -> None:
    assert decide(every) == expected


@pytest.mark.parametrize(
    ("every", "reason"),
    [
        ([capability("mpi"), capability("mpi", NO_MPI)], "impossible: on rank 1, mpi4py cannot"),
        ([capability("MPI")], r"transport must be one of auto, gloo, mpi, nccl: 'MPI'"),
        (
            [capability("ucc", source="HVD_SPARSE_TRANSPORT")] * 2,
            "HVD_SPARSE_TRANSPORT must be one of",
        ),
        (
            [*on_devices("a", requested="nccl"), capability("nccl")],
            "'nccl' is impossible: on rank 1, torch sees no CUDA device",
        ),
        (
            on_devices("a", "b", "a", requested="nccl"),
            "'nccl' is impossible: ranks 0 and 2 share the CUDA device a",
        ),
        ([capability("local")] * 2, "must be one of"),
        ([capability("gloo"), capability("mpi")], "'mpi' on rank 1, but transport is 'gloo' on"),
    ],
)
def test_impossible_decisions(every: list[Capability], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        decide(every)


def test_a_world_of_one_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_SPARSE_TRANSPORT", raising=False)
    transport = run_ranks(1, lambda t: create_transport("auto", ThreadBootstrap(t), 5.0))[0]
    assert transport.name == "local"
    assert transport.allreduce_sum(torch.ones(1), channel="s").item() == 1


def test_the_variable_overrides_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_SPARSE_TRANSPORT", "nonsense")

    def rank(local: LocalTransport) -> str:
        world = ThreadBootstrap(local)
        with pytest.raises(ConfigError, match=r"HVD_SPARSE_TRANSPORT must be one of .*'nonsense'"):
            create_transport("auto", world, 5.0)
        transport = create_transport("gloo", world, 5.0)
        transport.close()
        return transport.name

    assert run_ranks(2, rank) == ["gloo", "gloo"]


def test_ranks_of_other_releases_are_named() -> None:
    check_releases([(PROTOCOL, "1.0")] * 4)
    with pytest.raises(
        PlanError, match=r"1\.0 \(protocol 1\) on ranks 0, 2; 1\.1 \(protocol 2\) on ranks 1"
    ):
        check_releases([(1, "1.0"), (2, "1.1"), (1, "1.0")])


def of_another_release(local: LocalTransport, make: Callable[[ThreadBootstrap], Any]) -> str:
    """What a rank says where rank 1 runs another release."""
    world = ThreadBootstrap(local)
    gather = world.allgather_object

    def changed(obj: Any, name: str, timeout_s: float) -> list[Any]:
        if local.rank == 1 and name == "hvd_sparse.hello":
            protocol, _, _ = obj
            obj = (protocol, "9.9", b"what only 9.9 can read")
        return gather(obj, name, timeout_s)

    world.allgather_object = changed  # type: ignore[method-assign]
    with pytest.raises(PlanError) as caught:
        make(world)
    return str(caught.value)


def test_another_release_is_refused_before_anything_of_it_is_read() -> None:
    says = run_ranks(
        3, lambda local: of_another_release(local, lambda w: create_transport("gloo", w, 5.0))
    )
    assert len(set(says)) == 1
    assert f"9.9 (protocol {PROTOCOL}) on ranks 1" in says[0]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_conformance_of_gloo(scenario: Scenario) -> None:
    over_gloo(3, scenario)


def test_gloo_aborts_from_another_thread() -> None:
    aborts_from_another_thread(over_gloo)


def test_nothing_optional_is_imported() -> None:
    code = (
        "import sys, hvd_sparse.transports, hvd_sparse.transports.connect; "
        "print([m for m in ('horovod', 'mpi4py', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"
