"""No stage of a warm-up sends more than a dense ring allreduce, and every stage keeps the law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import ExDyna, OkTopk, TopkAllgather
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks

NUMEL = 40_000
REQUIRED: dict[str, dict[str, Any]] = {
    "dgc": {"momentum": 0.0},
}


def train_step(engine: Engine, rank: int, step: int, most: int = 50) -> tuple[Tensor, Tensor]:
    """A gradient of whole numbers, and what comes of it."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.randint(-most, most + 1, (NUMEL,), generator=generator).float()
    engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), gradient.clone())
    engine.scale = 1.0
    result = engine.result("w").clone()
    engine.settle()
    return gradient, result


def engine_of(transport: Transport, name: str, **arguments: Any) -> Engine:
    engine = Engine(METHODS[name](**{**REQUIRED.get(name, {}), **arguments}).make())
    engine.connect(transport)
    return engine


def steps(
    name: str, count: int, most: int = 50, **arguments: Any
) -> Callable[[Transport], list[Any]]:
    """What went into each step, what came out, what it left and the bytes that it sent."""

    def worker(transport: Transport) -> list[Any]:
        engine = engine_of(transport, name, **arguments)
        seen = []
        for step in range(count):
            given, result = train_step(engine, transport.rank, step, most)
            sent = int(engine.stats().buckets[0].history[-1].bytes_sent)
            seen.append((given, result, engine.state_dict()["residual"]["w"], sent))
        engine.disconnect()
        return seen

    return worker


def check(ranks: list[list[Any]], most_bytes: float) -> None:
    """The law of mass, the same bits everywhere, and the bytes."""
    total = torch.zeros(NUMEL).double()
    for outcomes in zip(*ranks, strict=True):
        total += sum(given.double() for given, *_ in outcomes)
        total -= outcomes[0][1].double()
        assert torch.equal(total, sum(residual.double() for _, _, residual, _ in outcomes))
        for _, result, _, sent in outcomes:
            assert torch.equal(result, outcomes[0][1])
            assert sent <= most_bytes


@pytest.mark.parametrize("world_size", [2, 4, 8, 3])
@pytest.mark.parametrize("density", [1.0, 0.7, 0.5, 0.25])
@pytest.mark.parametrize("name", ["dgc", "oktopk", "exdyna", "clt_k", "topk", "dragonn"])
def test_no_density_sends_more_than_a_dense_ring(
    name: str, density: float, world_size: int
) -> None:
    ranks = run_ranks(world_size, steps(name, 3, density=density), timeout_s=60.0)
    ring_bytes = 2 * 4 * NUMEL * (world_size - 1) / world_size
    check(ranks, 1.05 * ring_bytes)


@pytest.mark.parametrize("density", [0.3, 0.1])
def test_nor_does_a_gradient_of_equal_magnitudes(density: float) -> None:
    """No threshold has k of them; indices are gathered once it is known how many pass."""

    def worker(transport: Transport) -> list[int]:
        engine = engine_of(transport, "exdyna", density=density)
        for step in range(4):
            train_step(engine, transport.rank, step, most=1)
        sent = [int(each.bytes_sent) for each in engine.stats().buckets[0].history]
        engine.disconnect()
        return sent

    for sent in run_ranks(4, worker, timeout_s=60.0):
        assert max(sent) <= 1.05 * 2 * 4 * NUMEL * 3 / 4


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("density", [0.45, 0.3, 0.25, 0.1])
@pytest.mark.parametrize("louder", ["one rank", "every step"])
def test_nor_does_a_gradient_that_jumps(louder: str, density: float, world_size: int) -> None:
    """ExDyna's threshold is far too low then, and one rank may have all that is selected."""

    def worker(transport: Transport) -> list[int]:
        engine = engine_of(transport, "exdyna", density=density)
        for step in range(6):
            is_loud = step >= 3 and transport.rank == 0
            most = 10**step if louder == "every step" else 10_000 if is_loud else 10
            train_step(engine, transport.rank, step, most)
        sent = [int(each.bytes_sent) for each in engine.stats().buckets[0].history]
        engine.disconnect()
        return sent

    for sent in run_ranks(world_size, worker, timeout_s=60.0):
        assert max(sent) <= 1.05 * 2 * 4 * NUMEL * (world_size - 1) / world_size


@pytest.mark.parametrize("density", [0.3, 0.1, 0.03])
def test_nor_does_a_selector_that_misses_k(density: float) -> None:
    """Nine tenths of the entries reach the threshold, and four times k are sent."""
    arguments = {"density": density, "collective": "topk_allgather", "threshold": 5.0}
    ranks = run_ranks(4, steps("hard_threshold", 2, **arguments), timeout_s=60.0)
    check(ranks, 1.05 * 2 * 4 * NUMEL * 3 / 4)


@pytest.mark.parametrize("collective", ["ssar_recursive_double", "gtopk", "index_union", "oktopk"])
@pytest.mark.parametrize("density", [1.0, 0.25])
def test_nor_does_any_collective_that_is_named(collective: str, density: float) -> None:
    ranks = run_ranks(4, steps("topk", 2, density=density, collective=collective), timeout_s=60.0)
    check(ranks, 1.05 * 2 * 4 * NUMEL * 3 / 4)


@pytest.mark.parametrize(("world_size", "density"), [(12, 0.04), (24, 0.018)])
def test_nor_do_indices_that_lie_apart(world_size: int, density: float) -> None:
    """Where P is no power of two, some ranks send sums of more than the others, and the result."""
    ring_bytes = 2 * 4 * NUMEL * (world_size - 1) / world_size

    def worker(transport: Transport) -> None:
        engine = engine_of(
            transport, "topk", density=density, collective="ssar_recursive_double", momentum=0.0
        )
        gradient = (torch.arange(NUMEL) % world_size == transport.rank).float()
        engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), gradient)
        engine.scale = 1.0
        engine.result("w")
        engine.settle()
        assert engine.stats().buckets[0].history[-1].bytes_sent <= ring_bytes
        engine.disconnect()

    run_ranks(world_size, worker, timeout_s=60.0)


@pytest.mark.parametrize("wire", ["float16", "float16+gap", "bfloat16"])
@pytest.mark.parametrize("name", ["dgc", "oktopk", "exdyna"])
def test_a_dense_stage_has_the_wire_of_the_others(name: str, wire: str) -> None:
    """Half as many bytes as a dense ring of float32; what rounding loses stays."""
    ranks = run_ranks(3, steps(name, 3, 5000, density=1.0, wire=wire), timeout_s=60.0)
    for outcomes in zip(*ranks, strict=True):
        assert all(sent <= 1.05 * 4 * NUMEL * 2 / 3 for *_, sent in outcomes)
    given = sum(each[0].double() for rank in ranks for each in rank)
    applied = sum(each[1].double() for each in ranks[0])
    left = sum(rank[-1][2].double() for rank in ranks)
    torch.testing.assert_close(applied + left, given, rtol=0, atol=1e-2)
    assert left.any()


@pytest.mark.parametrize("name", ["dgc", "oktopk", "exdyna"])
def test_after_the_warm_up_the_methods_own_collective_works(name: str) -> None:
    """Two dense steps, two with density 0.25, then 0.01; states go on in between."""
    own = {"dgc": TopkAllgather, "oktopk": OkTopk, "exdyna": ExDyna}[name]
    arguments = {"density": 0.01, "dense_steps": 2, "warmup": "constant", "warmup_steps": 2}

    def worker(transport: Transport) -> list[float]:
        engine, other = (engine_of(transport, name, **arguments) for _ in range(2))
        shares = []
        for step in range(6):
            if step in (1, 3, 5):
                other.load_state_dict(engine.state_dict())
            _, result = train_step(engine, transport.rank, step)
            shares.append(float((result != 0).double().mean()))
            if step in (1, 3, 5):
                assert torch.equal(result, train_step(other, transport.rank, step)[1]), step
        bucket = engine._buckets[0]
        assert isinstance(bucket.collective, own)
        assert (
            bucket.stages.at(bucket.k_of(bucket.numel), bucket.step).collective is bucket.collective
        )
        engine.disconnect()
        other.disconnect()
        return shares

    for shares in run_ranks(4, worker, timeout_s=60.0):
        assert min(shares[:2]) > 0.95
        assert all(0.2 < share < 0.8 for share in shares[2:4])
        assert max(shares[4:]) < 0.045
