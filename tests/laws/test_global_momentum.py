"""Global momentum: heavy-ball SGD at density 1, over changes of memory and world, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.memories import GlobalMomentum
from hvd_sparse.methods import METHODS
from hvd_sparse.selectors import ExactTopK
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from tests.laws.buckets import bucket_by, step_of

NUMEL = 400
STEPS = 8


def gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator)


def method_of(kind: str, nesterov: bool = False, density: float = 1.0) -> Method:
    options: dict[str, Any] = {
        "density": density,
        "momentum": 0.5,
        "momentum_kind": kind,
        "nesterov": nesterov,
    }
    return METHODS["topk"](**options).make()


def train_step(engine: Engine, rank: int, step: int) -> Tensor:
    engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), gradient(rank, step))
    engine.scale = 1.0
    result = engine.result("w").clone()
    engine.settle()
    return result


def of_sgd(sums: list[Tensor], nesterov: bool) -> list[Tensor]:
    """What `torch.optim.SGD` with lr 1 subtracts in each step."""
    weights = torch.zeros(NUMEL, requires_grad=True)
    sgd = torch.optim.SGD([weights], lr=1.0, momentum=0.5, nesterov=nesterov)
    steps = []
    for total in sums:
        before = weights.detach().clone()
        weights.grad = total
        sgd.step()
        steps.append(before - weights.detach())
    return steps


@pytest.mark.parametrize("kinds", [("local", "global"), ("global", "local")])
def test_momentum_survives_a_change_of_its_kind(kinds: tuple[str, str]) -> None:
    first, second = kinds

    def worker(transport: Transport) -> list[Tensor]:
        engine = Engine(method_of(first))
        engine.connect(transport)
        results = []
        for step in range(STEPS):
            if step == STEPS // 2:
                engine.reassign(method_of(second))
            results.append(train_step(engine, transport.rank, step))
        engine.disconnect()
        return results

    ranks = run_ranks(3, worker, timeout_s=60.0)
    sums = [sum((gradient(r, s) for r in range(3)), torch.zeros(NUMEL)) for s in range(STEPS)]
    for a, b, expected in zip(ranks[0], ranks[1], of_sgd(sums, False), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_survives_a_change_of_the_world(nesterov: bool) -> None:
    """Rank 2's share goes to rank 0: the ranks' shares differ, and their sum is what it was."""

    def before(transport: Transport) -> dict[str, Any]:
        engine = Engine(method_of("global", nesterov))
        engine.connect(transport)
        for step in range(STEPS // 2):
            train_step(engine, transport.rank, step)
        state = engine.state_dict()
        engine.disconnect()
        return state

    states = run_ranks(3, before, timeout_s=60.0)
    for state in states:
        state["rank"] = state["world_size"] = None
    for kind in ("residual", "momentum"):
        states[0][kind]["w"] += states[2][kind]["w"]

    def after(transport: Transport) -> list[Tensor]:
        engine = Engine(method_of("global", nesterov))
        engine.connect(transport)
        engine.load_state_dict(states[transport.rank])
        rest = range(STEPS // 2, STEPS)
        results = [train_step(engine, transport.rank, step) for step in rest]
        engine.disconnect()
        return results

    ranks = run_ranks(2, after, timeout_s=60.0)
    sums = [
        sum((gradient(r, s) for r in range(3 if s < STEPS // 2 else 2)), torch.zeros(NUMEL))
        for s in range(STEPS)
    ]
    expected = of_sgd(sums, nesterov)[STEPS // 2 :]
    for a, b, theirs in zip(*ranks, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, theirs, rtol=1e-5, atol=1e-5)


def test_one_entry_step_by_step() -> None:
    """acc = residual + g + m s; what was not applied has no momentum."""

    def worker(transport: Transport) -> list[list[float]]:
        method = replace(method_of("global", density=1 / 3), selector=ExactTopK)
        bucket = bucket_by(method, transport, 3)
        seen = []
        for g in ([8.0, 1.0, 0.0], [1.0, 1.0, 0.0]):
            step_of(bucket, [torch.tensor(g)])
            tensors = bucket.memory.tensors()
            seen += [tensors["residual"].tolist(), tensors["momentum"].tolist()]
        return seen

    for seen in run_ranks(2, worker, timeout_s=10.0):
        assert seen[0] == [0.0, 1.0, 0.0]
        assert seen[1] == [8.0, 0.0, 0.0]  # 16 was applied
        assert seen[2] == [0.0, 2.0, 0.0]
        assert seen[3] == [5.0, 0.0, 0.0]  # 0.5 · 8 + 1 each


def test_a_sum_that_is_not_finite_leaves_a_finite_share() -> None:
    memory = GlobalMomentum(3, torch.device("cpu"), 1, momentum=0.5)
    memory.accumulate([torch.ones(3)], 1)
    values = torch.tensor([2.0, float("inf")])
    memory.applied(SparseStream(torch.tensor([0, 2], dtype=torch.int32), values, 3))
    assert memory.tensors()["momentum"].tolist() == [2.0, 0.0, 0.0]
