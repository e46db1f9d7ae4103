"""A step whose results nobody applied never happened: bit for bit, for every method.

Gradients are whole numbers, beside values that subtraction could not give back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks

SHAPES = {"large": (30, 40), "small": (257,)}
REQUIRED: dict[str, dict[str, Any]] = {"hard_threshold": {"threshold": 40.0}}


def whole_gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradients = {
        name: torch.randint(-99, 100, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }
    if step == 0:
        gradients["large"].view(-1)[::7] = 3e8  # next to which a float32 loses whole numbers
    return gradients


def reduced(engine: Engine, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, gradient in gradients.items():
        engine.submit(TensorSpec(name, SHAPES[name], "torch.float32"), gradient)
    engine.scale = engine.scale or 1.0
    return {name: engine.result(name).clone() for name in gradients}


def engine_of(transport: Transport, name: str, **arguments: Any) -> Engine:
    arguments = {"density": 0.03, "bucket_numel": 600, **REQUIRED.get(name, {}), **arguments}
    engine = Engine(METHODS[name](**arguments).make())
    engine.connect(transport)
    return engine


def flattened(state: Any) -> str:
    """A state as text that differs where a bit of it does."""
    if isinstance(state, Tensor):
        return f"{state.dtype}{tuple(state.shape)}{state.cpu().numpy().tobytes().hex()}"
    if isinstance(state, dict):
        return str({key: flattened(value) for key, value in state.items()})
    return str([flattened(each) for each in state]) if isinstance(state, list) else repr(state)


MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "local": {"momentum": 0.5, "momentum_kind": "local"},
    "global": {"momentum": 0.5, "momentum_kind": "global"},
    "global nesterov": {"momentum": 0.5, "momentum_kind": "global", "nesterov": True},
    "clipped": {"clip_norm": 100.0},
}


@pytest.mark.parametrize("memory_name", MEMORIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_skipped_step_leaves_no_trace(name: str, memory_name: str) -> None:
    """Two engines, of which one has steps that are skipped in between: they stay the same."""

    def worker(transport: Transport) -> None:
        engine = engine_of(transport, name, **MEMORIES[memory_name])
        for step in range(6):
            before = flattened(engine.state_dict())
            if step in (1, 4):
                reduced(engine, whole_gradients(90 + step, transport.rank))
                engine.settle(engine.residuals.changed)
                assert flattened(engine.state_dict()) == before, step
            reduced(engine, whole_gradients(step, transport.rank))
            engine.settle()
            assert flattened(engine.state_dict()) != before
        assert engine.skipped_steps == 2
        engine.disconnect()

    run_ranks(3, worker, timeout_s=60.0)


@pytest.mark.parametrize("name", METHODS)
def test_later_steps_are_those_of_an_engine_that_skipped_none(name: str) -> None:
    def steps(skips: bool) -> Callable[[Transport], list[dict[str, Tensor]]]:
        def worker(transport: Transport) -> list[dict[str, Tensor]]:
            engine = engine_of(transport, name)
            results = []
            for step in range(5):
                if skips and step == 2:
                    gradients = whole_gradients(77, transport.rank)
                    if transport.rank == 1:
                        gradients["small"][5] = float("inf")
                    reduced(engine, gradients)
                    engine.settle(engine.residuals.changed)
                results.append(reduced(engine, whole_gradients(step, transport.rank)))
                engine.settle()
            engine.disconnect()
            return results

        return worker

    straight, skipping = (run_ranks(3, steps(skips), timeout_s=60.0) for skips in (False, True))
    for one, other in zip(straight, skipping, strict=True):
        for a, b in zip(one, other, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in SHAPES)


def test_a_step_that_ends_in_the_middle_is_no_step() -> None:
    """One bucket is exchanged, the other one is not: both are as before."""

    def worker(transport: Transport) -> None:
        engine = engine_of(transport, "oktopk")
        reduced(engine, whole_gradients(0, transport.rank))
        engine.settle()
        before = copy.deepcopy(engine.state_dict())
        gradients = whole_gradients(1, transport.rank)
        engine.submit(TensorSpec("large", SHAPES["large"], "torch.float32"), gradients["large"])
        while not engine._worker.at_rest:  # one bucket's exchange is due, or under way
            sleep(0.001)
        with pytest.raises(ConfigError, match="between steps"):
            engine.state_dict()
        engine.disconnect()
        after = engine.state_dict()
        assert flattened(after) == flattened(before)

    run_ranks(1, worker, timeout_s=60.0)


def test_a_state_after_a_failure_has_nothing_of_the_step() -> None:
    """The background thread is still at what it has received, and ends before the state is read."""

    def worker(transport: Transport) -> None:
        engine = engine_of(transport, "oktopk")
        reduced(engine, whole_gradients(0, transport.rank))
        engine.settle()
        before, is_there = flattened(copy.deepcopy(engine.state_dict())), Event()
        for bucket in engine._buckets:
            give_back = bucket.memory.give_back

            def late(*given: Any, give_back: Any = give_back) -> None:
                is_there.set()
                sleep(0.5)
                give_back(*given)

            bucket.memory.give_back = late  # type: ignore[method-assign]
        for name, gradient in whole_gradients(1, transport.rank).items():
            engine.submit(TensorSpec(name, SHAPES[name], "torch.float32"), gradient)
        engine.scale = 1.0
        assert is_there.wait(20.0)
        engine.fail(RuntimeError("a hook of the script's own"))
        after = engine.state_dict()
        sleep(1.0)
        assert flattened(after) == flattened(engine.state_dict()) == before

    run_ranks(2, worker, timeout_s=60.0)


@pytest.mark.parametrize("kind", ["local", "global"])
def test_residuals_follow_the_unit_of_the_gradients(kind: str) -> None:
    def worker(transport: Transport) -> None:
        engine = engine_of(transport, "dgc", momentum=0.5, momentum_kind=kind)
        reduced(engine, whole_gradients(1, transport.rank))
        engine.settle()
        before = engine.state_dict()
        engine.rescale(0.5)
        after = engine.state_dict()
        for part in ("residual", "momentum"):
            assert before[part].keys() == SHAPES.keys()
            assert all(
                torch.equal(after[part][name], 0.5 * tensor) and tensor.any()
                for name, tensor in before[part].items()
            )
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)
