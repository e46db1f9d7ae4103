"""No step sends much more than k entries, whatever a selector takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.methods import METHODS
from hvd_sparse.selectors.correction import MOST_TIMES_K
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks

WORLD_SIZE = 3
NUMEL = 100_000
K = 100
REQUIRED: dict[str, dict[str, Any]] = {"hard_threshold": {"threshold": 3.3}}
"""About one in a thousand normal numbers reaches it."""


def engine_of(transport: Transport, method: Method) -> Engine:
    engine = Engine(method)
    engine.connect(transport)
    return engine


def step_of(engine: Engine, gradient: Tensor) -> tuple[Tensor, StepStats]:
    """A step of one tensor: its result, and the figures of the step."""
    engine.submit(TensorSpec("w", tuple(gradient.shape), str(gradient.dtype)), gradient)
    engine.scale = 1.0
    result = engine.result("w").clone()
    return result, engine.stats().buckets[0].history[-1]


def residual_of(engine: Engine) -> Tensor:
    return engine._buckets[0].memory.tensors()["residual"].clone()


def normal(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(NUMEL, generator=generator)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", METHODS)
def test_one_rank_that_overflows(name: str, bad: float, momentum: float) -> None:
    """All ranks see it, nobody sends more than a few times k, and the step leaves no trace."""
    method = METHODS[name](density=K / NUMEL, momentum=momentum, **REQUIRED.get(name, {})).make()

    def worker(transport: Transport) -> list[Tensor]:
        engine = engine_of(transport, method)
        results = [step_of(engine, normal(transport.rank, step))[0] for step in range(2)]
        engine.settle()
        before = residual_of(engine)

        gradient = normal(transport.rank, 2)
        if transport.rank == 1:
            gradient.fill_(bad)
        result, stats = step_of(engine, gradient)
        assert not bool(result.isfinite().all())
        results.append(result)
        assert stats.nnz_selected <= MOST_TIMES_K * K
        entry_bytes, ranks_entries = 8, MOST_TIMES_K * K + 2 * K
        assert stats.bytes_sent <= 3 * (WORLD_SIZE - 1) * entry_bytes * ranks_entries
        engine.settle(engine.residuals.changed)
        assert torch.equal(residual_of(engine), before)

        result, _ = step_of(engine, normal(transport.rank, 3))
        assert bool(result.isfinite().all())
        engine.disconnect()
        return [*results, result]

    ranks = run_ranks(WORLD_SIZE, worker, timeout_s=60.0)
    for results in zip(*ranks, strict=True):
        for other in results[1:]:
            assert torch.equal(results[0].view(torch.int32), other.view(torch.int32))


def test_what_reaches_a_hard_threshold_leaves_in_turns() -> None:
    """Everything does: the largest first, the rest in the steps that follow, none of it lost."""
    numel, k = 1000, 10
    most = MOST_TIMES_K * k
    options = METHODS["hard_threshold"](density=k / numel, threshold=0.5)  # type: ignore[call-arg]

    def worker(transport: Transport) -> Tensor:
        engine = engine_of(transport, options.make())
        generator = torch.Generator().manual_seed(transport.rank)
        gradient = (torch.randperm(numel, generator=generator) + 1).float()
        total = torch.zeros(numel)
        for step in range(numel // most):
            result, stats = step_of(engine, gradient if step == 0 else torch.zeros(numel))
            assert stats.nnz_selected == most
            assert stats.nnz_held_back == numel - most * (step + 1)
            left = residual_of(engine)
            assert float(left.max()) == numel - most * (step + 1)
            total += result
        assert int(left.count_nonzero()) == 0
        result, stats = step_of(engine, torch.zeros(numel))
        assert int(result.count_nonzero()) == stats.nnz_held_back == 0
        assert engine.stats().totals.nnz_held_back > 0
        engine.disconnect()
        return torch.stack([total, gradient])

    ranks = run_ranks(WORLD_SIZE, worker, timeout_s=60.0)
    applied = [total for total, _ in ranks]
    assert torch.equal(applied[0], sum(gradient for _, gradient in ranks))
    for other in applied[1:]:
        assert torch.equal(applied[0], other)
