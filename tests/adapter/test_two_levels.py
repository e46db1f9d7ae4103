"""Two levels among processes: shared memory, and a rank that dies."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import TransportError
from hvd_sparse.hosts import Hosts
from hvd_sparse.methods import METHODS
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from tests.asleep import meet
from tests.grids import regular_grid
from tests.launch import horovodrun
from tests.lean import start_lean
from tests.ranks import Ranks, World, with_ranks

SHAPES = {"large": (70, 1000), "small": (257,)}


def connected(grid: tuple[int, int], timeout_s: float = 60.0, **arguments: Any) -> Engine:
    """An engine on two levels, and memory that has been mapped by all when its first step ends."""
    transport: Any = create_transport("auto", HorovodBootstrap(), timeout_s)
    arguments = {"density": 0.02, "bucket_numel": 600, **arguments}
    engine = Engine(METHODS["oktopk"](**arguments).make())
    engine.connect(transport)
    engine.hosts = Hosts(transport, regular_grid(*grid, transport.rank))
    return engine


def gradients_of(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randint(-99, 100, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }


def reduced(engine: Engine, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, gradient in gradients.items():
        engine.submit(TensorSpec(name, SHAPES[name], "torch.float32"), gradient)
    engine.scale = engine.scale or 1.0
    return {name: engine.result(name).clone() for name in gradients}


def steps(grid: tuple[int, int], count: int) -> list[dict[str, tuple[Any, Any]]]:
    """What each step applied, and what this rank kept after it: arrays by name."""
    engine = connected(grid)
    done = []
    for step in range(count):
        results = reduced(engine, gradients_of(step, hvd.rank()))
        engine.settle()
        kept = engine.state_dict()["residual"]
        done.append({name: (results[name].numpy(), kept[name].numpy()) for name in SHAPES})
    engine.disconnect()
    return done


def left_alone() -> str:
    """What a rank raises whose neighbour in the host is gone before it has its gradients."""
    engine = connected((1, 4), timeout_s=20.0)
    reduced(engine, gradients_of(0, hvd.rank()))
    assert "memfd:hvd_sparse" in Path("/proc/self/maps").read_text()
    told = ""
    if hvd.rank() == 3:
        engine.disconnect()
    else:
        try:
            reduced(engine, gradients_of(1, hvd.rank()))
        except TransportError as error:
            told = f"{type(error).__name__}: {error}"
        engine.disconnect()
    del engine
    gc.collect()
    assert "memfd:hvd_sparse" not in Path("/proc/self/maps").read_text()
    return told


STEPS = 6
WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "sum": {"op": hvd.Sum},
    "predivide": {"op": hvd.Average, "gradient_predivide_factor": 2.0},
}


def trained(label: str, compression: Any, **arguments: Any) -> tuple[Tensor, Any]:
    """The weights after a few steps, flat, and the compression; for none, Horovod's."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 3))
    named = [(f"{label}.{name}", p) for name, p in model.named_parameters()]
    if isinstance(compression, dict):
        compression = hvd_sparse.Compression.topk(
            named, dense_below=100, bucket_numel=600, timeout_s=60.0, **compression
        )
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=named, compression=compression, **arguments
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), compression


def engine_of(compression: Any) -> Engine:
    engine: Engine = compression._engine
    return engine


def alike(weights: Tensor, label: str) -> None:
    """All ranks have the same bits."""
    every = hvd.allgather(weights.view(1, -1), name=label)
    assert all(torch.equal(each, every[0]) for each in every), label


def main() -> None:
    place = (hvd.local_size(), hvd.cross_size(), hvd.local_rank(), hvd.cross_rank())
    assert place == (2, 2, hvd.rank() % 2, hvd.rank() // 2), place
    for name, arguments in WAYS.items():
        dense, _ = trained(f"{name}.dense", hvd.Compression.none, **arguments)
        options = {"density": 1.0, "hierarchical": True}
        sparse, compression = trained(f"{name}.sparse", options, **arguments)
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-6)
        hosts = engine_of(compression).hosts
        assert hosts is not None
        assert (hosts.grid.hosts, hosts.grid.local_size) == (2, 2)
        alike(sparse, name)
        compression.close()
    weights, compression = trained("sparse", {"density": 0.02, "hierarchical": True})
    alike(weights, "sparse")
    sent, kept = compression.stats().totals.bytes_sent, compression.state_dict()["residual"]
    compression.close()
    _, flat = trained("flat", {"density": 0.02})
    assert sent < flat.stats().totals.bytes_sent / 2
    assert kept
    for tensor in kept.values():
        total = hvd.allreduce(tensor, op=hvd.Sum, name="kept")
        assert total.any()
    flat.close()
    meet("two levels")
    print(f"rank {hvd.rank()}: two levels passed", flush=True)


@with_ranks(World(4), World(4, "mpi"))
@pytest.mark.parametrize("grid", [(2, 2), (1, 4)], ids=str)
def test_the_law_holds_among_processes(ranks: Ranks, grid: tuple[int, int]) -> None:
    histories = [done.result for done in ranks.run(steps, grid, 4)]
    for name, shape in SHAPES.items():
        before = np.zeros(shape, np.float32)
        for step in range(4):
            applied, left = zip(*(history[step][name] for history in histories), strict=True)
            assert all(np.array_equal(each, applied[0]) for each in applied)
            came = sum(gradients_of(step, rank)[name].numpy() for rank in range(4))
            assert np.array_equal(before + came, applied[0] + sum(left)), (name, step)
            before = sum(left)


@with_ranks(World(4))
def test_who_waits_for_a_neighbour_that_is_gone_is_told(ranks: Ranks) -> None:
    """All of them wait in shared memory, where no connection breaks."""
    told = [done.result for done in ranks.run(left_alone)]
    assert told[3] == ""
    assert all(re.search(r"rank 3: .*gradients of .* of its host", each) for each in told[:3]), told


@pytest.mark.launches
def test_trainings_of_two_hosts_of_two_workers() -> None:
    """Horovod takes two names of this machine for two hosts."""
    done = horovodrun(
        4, "adapter/test_two_levels.py", hosts="localhost:2,127.0.0.1:2", timeout=200.0
    )
    for rank in range(4):
        assert f"rank {rank}: two levels passed" in done.stdout


if __name__ == "__main__":
    hvd.init()
    start_lean()
    main()
    hvd.shutdown()
    sys.exit(0)
