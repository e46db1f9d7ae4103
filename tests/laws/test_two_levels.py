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
from hvd_sparse.hosts import Hosts
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import LocalTransport, run_ranks
from tests.devices import on_every_device
from tests.grids import regular_grid
from tests.laws.test_step_commit import MEMORIES, REQUIRED, flattened

SHAPES = {"a": (30, 40), "b": (257,), "c": (5,), "d": ()}
GRIDS = [(2, 1), (1, 2), (2, 2), (3, 2), (2, 4), (4, 2)]


def engine_of(
    transport: LocalTransport,
    grid: tuple[int, int],
    name: str = "topk",
    **arguments: Any,
) -> Engine:
    arguments = {"density": 0.05, "bucket_numel": 600, **REQUIRED.get(name, {}), **arguments}
    engine = Engine(METHODS[name](**arguments).make())
    engine.connect(transport)
    engine.hosts = Hosts(transport, regular_grid(*grid, transport.rank))
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


def trained(engine: Engine, rank: int, steps: int) -> Steps:
    """What each step has applied, and what this rank then keeps; disconnects."""
    done = []
    for step in range(steps):
        results = reduced(engine, gradients_of(step, rank))
        engine.settle()
        done.append((results, residuals_of(engine)))
    engine.disconnect()
    return done


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


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_shards_and_what_was_applied_are_the_gradients(grid: tuple[int, int]) -> None:
    def worker(transport: LocalTransport) -> Steps:
        return trained(engine_of(transport, grid), transport.rank, 4)

    ranks = run_ranks(grid[0] * grid[1], worker, timeout_s=60.0)
    check_laws(ranks, 4)
    if grid[0] == 1:  # nobody to exchange with: all of the sum is applied
        assert not any(left.any() for rank in ranks for _, kept in rank for left in kept.values())


COLLECTIVES = [a.name for a in ALGORITHMS if a.name not in ("dense", "exdyna", "clt_k")]
"""Those that `collective` names; the others have a constructor of their own."""


@pytest.mark.parametrize("name", METHODS)
def test_every_compressor(name: str) -> None:
    grid = (2, 2)

    def worker(transport: LocalTransport) -> Steps:
        return trained(engine_of(transport, grid, name, momentum=0.0), transport.rank, 3)

    check_laws(run_ranks(4, worker, timeout_s=60.0), 3)


CASES = [("plain", collective) for collective in COLLECTIVES]
CASES += [(memory, "oktopk") for memory in MEMORIES if memory not in ("plain", "clipped")]


@pytest.mark.parametrize("wire", ["float32", "float16+gap", "qsgd4"])
@pytest.mark.parametrize(("memory", "collective"), CASES)
def test_every_memory_collective_and_wire(memory: str, collective: str, wire: str) -> None:
    """To float32's rounding, since momentum and rounded values are no whole numbers."""
    arguments = {**MEMORIES[memory], "collective": collective, "wire": wire}

    def worker(transport: LocalTransport) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
        engine = engine_of(transport, (2, 2), **arguments)
        history = []
        for step in range(3):
            results = reduced(engine, gradients_of(step, transport.rank))
            engine.settle()
            history.append((results, engine.state_dict()))
        engine.disconnect()
        return history

    ranks = run_ranks(4, worker, timeout_s=60.0)
    m = arguments.get("momentum", 0.0)
    for name in SHAPES:
        before = momentum = lead = torch.zeros(SHAPES[name], dtype=torch.float64)
        for step, states in enumerate(zip(*ranks, strict=True)):
            applied = states[0][0][name]
            assert all(torch.equal(results[name], applied) for results, _ in states)
            came = sum(gradients_of(step, rank)[name].double() for rank in range(4))
            left = sum(state["residual"][name].double() for _, state in states)
            total = applied.double()
            if "nesterov" in arguments:  # its lead over the sum is the optimizer's alone
                total = lead = (total + m * lead) / (1 + m)
            torch.testing.assert_close(
                total + left,
                before + came + m * momentum,
                rtol=0,
                atol=2e-3,
                msg=f"{name}, step {step}",
            )
            before = left
            if m:
                momentum = sum(state["momentum"][name].double() for _, state in states)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_any_type_and_device_are_summed_in_float32(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Whole numbers up to 99 are exact in all types, and so are their sums in float32."""

    def worker(transport: LocalTransport) -> Steps:
        engine = engine_of(transport, (2, 2))
        done = []
        for step in range(3):
            gradients = gradients_of(step, transport.rank, dtype)
            results = reduced(engine, {name: g.to(device) for name, g in gradients.items()})
            engine.settle()
            done.append((on_cpu(results), on_cpu(residuals_of(engine))))
        engine.disconnect()
        return done

    ranks = run_ranks(4, worker, timeout_s=60.0)
    for name in SHAPES:
        before = torch.zeros(SHAPES[name])
        for step in range(3):
            came = sum(gradients_of(step, rank, dtype)[name].float().cpu() for rank in range(4))
            left = sum(rank[step][1][name] for rank in ranks)
            assert torch.equal(ranks[0][step][0][name], (before + came - left).to(dtype))
            before = left


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def test_gradients_may_be_strided_and_the_last_results() -> None:
    """What is read of them must be read before the next results are written over them."""

    def worker(transport: LocalTransport) -> Tensor:
        engine = engine_of(transport, (2, 2), density=1.0)
        gradients = gradients_of(0, transport.rank)
        gradients["a"] = gradients["a"].t().contiguous().t()
        for name, gradient in gradients.items():
            engine.submit(TensorSpec(name, SHAPES[name], "torch.float32"), gradient)
        engine.scale = 1.0
        views = {name: engine.result(name) for name in gradients}
        for name, view in views.items():
            engine.submit(TensorSpec(name, SHAPES[name], "torch.float32"), view.mul_(2))
        result = engine.result("a").clone()
        engine.disconnect()
        return result

    for result in run_ranks(4, worker, timeout_s=60.0):
        assert torch.equal(result, 8 * sum(gradients_of(0, rank)["a"] for rank in range(4)))


@pytest.mark.parametrize("name", ["topk", "oktopk", "dgc", "exdyna"])
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    def worker(transport: LocalTransport) -> None:
        engine = engine_of(transport, (2, 2), name)
        for step in range(4):
            before = flattened(engine.state_dict())
            if step in (1, 3):
                gradients = gradients_of(90 + step, transport.rank)
                if transport.rank == 3:
                    gradients["a"][2, 3] = float("inf")
                assert not reduced(engine, gradients)["a"].isfinite().all()  # on all ranks
                engine.settle(engine.residuals.changed)
                assert flattened(engine.state_dict()) == before, step
            reduced(engine, gradients_of(step, transport.rank))
            engine.settle()
            assert flattened(engine.state_dict()) != before
        assert engine.skipped_steps == 2
        engine.disconnect()

    run_ranks(4, worker, timeout_s=60.0)


def test_a_residual_is_a_shard() -> None:
    """Memory, and what is selected, are an L-th of the flat form's."""

    def worker(transport: LocalTransport) -> tuple[int, int]:
        engine = engine_of(transport, (2, 4), bucket_numel=10_000)
        reduced(engine, gradients_of(0, transport.rank))
        (bucket,) = engine._buckets
        engine.disconnect()
        return bucket.memory.residual.numel(), bucket.stats.nnz_selected

    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for kept, selected in run_ranks(8, worker, timeout_s=60.0):
        assert kept <= numel // 4 + 16
        assert selected <= 1.1 * 0.05 * kept + 1
