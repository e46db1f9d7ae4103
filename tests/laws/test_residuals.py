"""Tensors that become dense, are frozen or forgotten: nothing jumps, and nothing is lost unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Choice, Engine, Method, TensorSpec
from hvd_sparse.engine.residuals import RELEASED_SHARE, Residuals
from hvd_sparse.engine.state import EngineState
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks
from tests.plans import AllDense

MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "local": {"momentum": 0.5, "momentum_kind": "local"},
    "local nesterov": {"momentum": 0.5, "momentum_kind": "local", "nesterov": True},
    "global": {"momentum": 0.5, "momentum_kind": "global"},
    "global nesterov": {"momentum": 0.5, "momentum_kind": "global", "nesterov": True},
}
SHAPES = {"a": (30, 20), "b": (300,)}


def method_of(memory: str = "plain", density: float = 0.02, name: str = "topk") -> Method:
    return METHODS[name](density=density, **MEMORIES[memory]).make()


def normal(rank: int, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    seed = 1000 * step + 10 * rank + len(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train_step(
    engine: Engine, rank: int, step: int, frozen: tuple[str, ...] = (), rate: float = 1.0
) -> Any:
    for name, shape in SHAPES.items():
        gradient = torch.zeros(shape) if name in frozen else rate * normal(rank, step, name, shape)
        spec = TensorSpec(name, shape, "torch.float32")
        engine.submit(spec, gradient, frozen=name in frozen)
    engine.scale = 1.0
    results = {name: engine.result(name).clone() for name in SHAPES}
    engine.settle()
    return results


def test_a_residual_that_becomes_dense_is_no_jump() -> None:
    """At density 0.001, whose residual is longer than twenty gradients."""
    numel, before, after = 50_000, 600, 80
    spec = TensorSpec("w", (numel,), "torch.float32")

    def gradient(rank: int, step: int) -> Tensor:
        return normal(rank, step, "w", (numel,)) + 1.0  # a part that all steps have in common

    def worker(transport: Transport) -> tuple[list[float], float, Tensor, Tensor]:
        options: dict[str, Any] = {"density": 0.001, "collective": "topk_allgather"}
        engine = Engine(METHODS["topk"](**options).make())
        engine.connect(transport)
        given = applied = torch.zeros(numel).double()
        for step in range(before):
            g = gradient(transport.rank, step)
            given = given + g
            engine.submit(spec, g)
            engine.scale = 1.0
            applied = applied + engine.result("w")
            engine.settle()
        residual = engine.state_dict()["residual"]["w"]
        long = float(residual.norm() / gradient(transport.rank, 0).norm())
        engine.reassign(AllDense())
        norms = []
        for step in range(before, before + after):
            g = gradient(transport.rank, step)
            given = given + g
            released = engine.residuals.release("w", g)
            total = transport.allreduce_sum(g if released is None else g + released, channel="x")
            engine.residuals.flushed("w")
            engine.settle(() if step % 5 else engine.residuals.changed)  # some steps are skipped
            if step % 5 == 0:
                given = given - g
                continue
            applied = applied + total
            plain = transport.allreduce_sum(g, channel="x")
            norms.append(float(total.norm() / plain.norm()))
        left = engine.residuals.leftover("w")
        kept = torch.zeros(numel) if left is None else left
        assert abs(engine.stats().waiting_l1 - float(kept.double().abs().sum())) < 1e-3
        engine.disconnect()
        return norms, long, given - kept, applied

    ranks = run_ranks(2, worker, timeout_s=120.0)
    for norms, long, _, applied in ranks:
        assert long > 20
        assert max(norms) < 1.0 + 1.5 * RELEASED_SHARE
        assert min(norms[:10]) > 1.0 + 0.5 * RELEASED_SHARE  # it is on its way
        given = sum(each for _, _, each, _ in ranks)
        torch.testing.assert_close(applied, given, rtol=0, atol=5e-2)


def waiting(residual: Tensor) -> Residuals:
    """Those of one dense tensor, "w"."""
    residuals = Residuals()
    residuals.load(EngineState({"w": residual}), strict=False)
    return residuals


def released(residuals: Residuals, gradient: Tensor) -> Tensor:
    part = residuals.release("w", gradient)
    assert part is not None
    return part


def settle(residuals: Residuals) -> None:
    residuals.flushed("w")
    residuals.settle(counts=True)


def test_a_residual_is_released_to_the_end() -> None:
    residuals, parts = waiting(torch.full((4,), 3.0)), []
    while residuals.leftover("w") is not None:
        parts.append(float(released(residuals, torch.full((4,), 2.0))[0]))
        settle(residuals)
    assert parts == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("memory", [memory for memory in MEMORIES if memory != "plain"])
def test_momentum_leaves_the_compression_alike_in_a_new_process(memory: str) -> None:
    """Where it comes from a state, and no bucket has been made since."""

    def worker(transport: Transport) -> None:
        first = Engine(method_of(memory))
        first.connect(transport)
        train_step(first, transport.rank, 0)
        state = first.state_dict()
        first.reassign(AllDense())
        expected = first.take_momentum(SHAPES)
        assert all(tensor.any() for tensor in expected)
        second = Engine(method_of(memory))
        second.load_state_dict(state)
        second.connect(transport)
        second.reassign(AllDense())
        for mine, theirs in zip(second.take_momentum(SHAPES), expected, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(second.take_momentum({"scalar": ()})[0], torch.tensor(0.0))
        second.disconnect()

    run_ranks(2, worker)


def test_a_release_with_float16_is_what_its_rounding_lets_through() -> None:
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(1000, generator=generator)
    residuals = waiting(residual.clone())
    sent = torch.zeros(1000, dtype=torch.float64)
    for _ in range(5):
        g = torch.randn(1000, generator=generator).half()
        part = released(residuals, g)
        assert torch.equal((part + g).half().float(), part + g)
        sent += part
        settle(residuals)
    left = residuals.leftover("w")
    assert left is not None
    torch.testing.assert_close(sent + left, residual.double(), rtol=0, atol=1e-6)
    assert left.abs().max() < 4e-3  # half of what float16 tells apart
    huge = torch.tensor([6e4, 1.0]).half()
    assert released(waiting(torch.tensor([1e4, 1.0])), huge).tolist() == [0.0, 1.0]


def test_a_release_is_contiguous_whatever_the_gradient_is() -> None:
    residuals, g = waiting(torch.ones(4, 3, 2, 2)), torch.full((4, 3, 2, 2), 0.1).half()
    part = released(residuals, g.to(memory_format=torch.channels_last))
    assert part.is_contiguous()
    settle(residuals)
    left = residuals.leftover("w")
    assert left is not None
    assert left.is_contiguous()


def test_a_release_is_capped_where_squares_overflow() -> None:
    residual, g = torch.full((4,), 3e30), torch.full((4,), 2e30)
    part = released(waiting(residual), g)
    torch.testing.assert_close(part, torch.full((4,), 1e30))


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["topk", "exdyna", "oktopk"])
def test_a_frozen_tensor_holds_what_it_has(name: str, memory: str) -> None:
    """And gets a gradient of zeros; thawed, it goes on. States in between know of it."""

    def worker(transport: Transport) -> None:
        engine = Engine(method_of(memory, name=name))
        engine.connect(transport)
        for step in range(5):
            train_step(engine, transport.rank, step)
        before = engine.state_dict()
        assert engine.stats().waiting_l1 == 0.0
        for step in range(5, 12):
            if step == 8:
                engine.load_state_dict(engine.state_dict())
            results = train_step(engine, transport.rank, step, frozen=("a",))
            assert not results["a"].any()
            assert results["b"].any()
        after = engine.state_dict()
        held = before["residual"]["a"]
        for kind in ("residual",) if memory == "plain" else ("residual", "momentum"):
            assert torch.equal(after[kind]["a"], before[kind]["a"])
            assert not torch.equal(after[kind]["b"], before[kind]["b"])
        assert engine.stats().waiting_l1 == pytest.approx(float(held.double().abs().sum()))
        results = train_step(engine, transport.rank, 12)
        assert results["a"].any()
        assert engine.stats().waiting_l1 == 0.0
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)


@pytest.mark.parametrize("memory", [memory for memory in MEMORIES if memory != "plain"])
def test_a_thawed_tensor_goes_on_as_in_dense_training(memory: str) -> None:
    """At density 1, with the momentum that it had."""
    frozen_steps = range(3, 6)

    def worker(transport: Transport) -> Tensor:
        engine = Engine(method_of(memory, density=1.0))
        engine.connect(transport)
        seen = []
        for step in range(9):
            frozen = ("a",) if step in frozen_steps else ()
            seen.append(train_step(engine, transport.rank, step, frozen)["a"])
            if step == 4:
                engine.rescale(0.5)
                engine.rescale(2.0)
        engine.disconnect()
        return torch.stack(seen)

    weight = torch.zeros(SHAPES["a"], requires_grad=True)
    options = MEMORIES[memory]
    sgd = torch.optim.SGD([weight], 1.0, options["momentum"], nesterov="nesterov" in options)
    for step, seen in enumerate(run_ranks(2, worker)[0]):
        before = weight.detach().clone()
        weight.grad = None
        if step not in frozen_steps:
            weight.grad = normal(0, step, "a", SHAPES["a"]) + normal(1, step, "a", SHAPES["a"])
        sgd.step()
        torch.testing.assert_close(seen, before - weight.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_is_forgotten_is_gone_and_counted(memory: str) -> None:
    def worker(transport: Transport) -> None:
        engine = Engine(method_of(memory))
        engine.connect(transport)
        for step in range(4):
            train_step(engine, transport.rank, step)
        before = engine.state_dict()
        lost = engine.forget(["a"])
        assert lost == pytest.approx(float(before["residual"]["a"].double().abs().sum()))
        assert lost > 0
        assert engine.stats().dropped_l1 == lost
        after = engine.state_dict()
        for kind in ("residual",) if memory == "plain" else ("residual", "momentum"):
            assert before[kind]["a"].any()
            assert not after[kind]["a"].any()
            assert torch.equal(after[kind]["b"], before[kind]["b"])
        train_step(engine, transport.rank, 4)
        engine.reassign(AllDense())
        assert engine.residuals.leftover("b") is not None
        engine.forget(["b"])
        assert engine.residuals.leftover("b") is None
        engine.load_state_dict(engine.state_dict())
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_has_turned_dense_for_good_is_saved_and_loaded(memory: str) -> None:
    """Nothing is left of its residual, and so nothing of what belonged to it."""

    def worker(transport: Transport) -> None:
        engine = Engine(method_of(memory))
        engine.connect(transport)
        for step in range(4):
            train_step(engine, transport.rank, step)
        engine.reassign(AllDense())
        for name, shape in SHAPES.items():
            assert engine.residuals.release(name, torch.full(shape, 100.0)) is not None
            engine.residuals.flushed(name)
        engine.settle()
        state = engine.state_dict()
        assert state["residual"] == state["momentum"] == {}
        assert state["buckets"] == []
        engine.load_state_dict(state)
        assert engine.state_dict() == state
        engine.disconnect()

    run_ranks(2, worker)


class HalfOnly:
    """The assignment that compresses tensors of one type."""

    description = "half"

    def choice_of(self, spec: TensorSpec) -> Choice:
        return Choice(method_of("local") if spec.dtype == "torch.bfloat16" else None)


def test_momentum_of_a_type_comes_with_its_state() -> None:
    """In a new process, where a state does not tell of which type the tensor is."""

    def worker(transport: Transport) -> None:
        engine = Engine(HalfOnly())
        spec, g = TensorSpec("w", (600,), "torch.bfloat16"), torch.ones(600).bfloat16()
        for _ in range(2):
            state = engine.state_dict()
            engine = Engine(HalfOnly())
            engine.load_state_dict(state)
            engine.connect(transport)
            engine.begin_step()
            engine.submit(spec, g)
            engine.scale = 1.0
            engine.result("w")
            engine.settle()
        # Sent entries have none; the others have m u + g.
        assert engine.state_dict()["momentum"]["w"].unique().tolist() == [0.0, 1.0, 1.5]
        engine.disconnect()

    run_ranks(1, worker)


def test_rescaling_at_a_drop_of_the_rate_is_the_papers_form() -> None:
    """Rate times gradient in the residual, bit for bit where rates are powers of two."""
    rates = [0.5] * 4 + [0.125] * 4

    def worker(transport: Transport) -> None:
        ours, papers = Engine(method_of("plain")), Engine(method_of("plain"))
        for engine in (ours, papers):
            engine.connect(transport)
        for step, rate in enumerate(rates):
            if step and rate != rates[step - 1]:
                ours.rescale(rates[step - 1] / rate)
            moved = train_step(ours, transport.rank, step)
            expected = train_step(papers, transport.rank, step, rate=rate)
            for name, tensor in expected.items():
                assert tensor.count_nonzero()
                assert torch.equal(rate * moved[name], tensor), (step, name)
        for engine in (ours, papers):
            engine.disconnect()

    run_ranks(2, worker)


def test_a_state_is_a_copy() -> None:
    """Also before the next step has made a plan."""

    def worker(transport: Transport) -> None:
        engine = Engine(method_of("local"))
        engine.connect(transport)
        train_step(engine, transport.rank, 0)
        engine.reassign(engine.assignment)
        kept = engine.state_dict()
        before = {kind: kept[kind]["a"].clone() for kind in ("residual", "momentum")}
        engine.rescale(2.0)
        for kind, tensor in before.items():
            assert torch.equal(kept[kind]["a"], tensor)
            assert torch.equal(engine.state_dict()[kind]["a"], 2 * tensor)
        engine.disconnect()

    run_ranks(2, worker)
