"""The laws over hosts: what shards keep and what was applied are the sum of all gradients.

Gradients are whole numbers, so that every sum is exact and the laws are equalities.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives.registry import ALGORITHMS
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.hosts import Grid, Hosts
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import LocalTransport, run_ranks
from tests.laws.test_step_commit import MEMORIES, REQUIRED, flattened

SHAPES = {"a": (30, 40), "b": (257,), "c": (5,), "d": ()}
GRIDS = [(2, 1), (1, 2), (2, 2), (3, 2), (2, 4), (4, 2)]


def engine_of(
    transport: LocalTransport,
    grid: tuple[int, int],
    name: str = "topk",
    shares_memory: bool = True,
    **arguments: Any,
) -> Engine:
    arguments = {"density": 0.05, "bucket_numel": 600, **REQUIRED.get(name, {}), **arguments}
    engine = Engine(METHODS[name](**arguments).make())
    hosts = Hosts(transport, Grid.regular(*grid, transport.rank), shares_memory=shares_memory)
    engine.connect(transport, hosts)
    return engine


def gradients_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randint(-99, 100, shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }


def reduced(engine: Engine, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, gradient in gradients.items():
        engine.submit(TensorSpec(name, SHAPES[name], str(gradient.dtype)), gradient)
    engine.scale = engine.scale or 1.0
    return {name: engine.result(name).clone() for name in gradients}


def residuals_of(engine: Engine) -> dict[str, Tensor]:
    residuals: dict[str, Tensor] = engine.state_dict()["residual"]
    return residuals


Steps = list[tuple[dict[str, Tensor], dict[str, Tensor]]]


def check_laws(ranks: list[Steps], steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Every step: what was there and came in is what was applied and stays; all ranks apply it."""
    for name in SHAPES:
        before = torch.zeros(SHAPES[name])
        for step in range(steps):
            came = sum(gradients_of(step, rank, dtype)[name].float() for rank in range(len(ranks)))
            applied = ranks[0][step][0][name]
            assert all(torch.equal(rank[step][0][name], applied) for rank in ranks)
            left = sum(rank[step][1][name] for rank in ranks)
            assert torch.equal(before + came, applied.float() + left), (name, step)
            before = left


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_shards_and_what_was_applied_are_the_gradients(
    grid: tuple[int, int], shares_memory: bool
) -> None:
    def worker(transport: LocalTransport) -> Steps:
        engine = engine_of(transport, grid, shares_memory=shares_memory)
        done = []
        for step in range(4):
            results = reduced(engine, gradients_of(step, transport.rank))
            engine.settle(counts=True)
            done.append((results, residuals_of(engine)))
        engine.disconnect()
        return done

    ranks = run_ranks(grid[0] * grid[1], worker, timeout_s=60.0)
    check_laws(ranks, 4)
    if grid[0] == 1:  # nobody to exchange with: all of the sum is applied
        assert not any(left.any() for rank in ranks for _, kept in rank for left in kept.values())


COLLECTIVES = [algorithm.name for algorithm in ALGORITHMS]


@pytest.mark.parametrize("name", METHODS)
def test_every_compressor(name: str) -> None:
    grid = (2, 2)

    def worker(transport: LocalTransport) -> Steps:
        engine = engine_of(transport, grid, name, momentum=0.0)
        done = []
        for step in range(3):
            results = reduced(engine, gradients_of(step, transport.rank))
            engine.settle(counts=True)
            done.append((results, residuals_of(engine)))
        engine.disconnect()
        return done

    check_laws(run_ranks(4, worker, timeout_s=60.0), 3)
