"""State on two levels: shards by name, which go on in any other shape of the world."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Choice, Engine, TensorSpec
from hvd_sparse.engine.checkpoint import load_checkpoint, save_checkpoint
from hvd_sparse.hosts import Hosts
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import LocalTransport, run_ranks
from tests.engine.checkpoint_kills import gather_over
from tests.grids import regular_grid
from tests.laws.test_step_commit import flattened
from tests.laws.test_two_levels import SHAPES, engine_of, gradients_of, reduced

Sums = dict[str, dict[str, Tensor]]
ZEROS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def sums_of(states: list[dict[str, Any]]) -> Sums:
    """Residuals and momenta, summed over the ranks."""
    return {
        kind: {name: sum(s[kind].get(name, ZEROS[name]) for s in states) for name in SHAPES}
        for kind in ("residual", "momentum")
    }


def trained(grid: tuple[int, int], **arguments: Any) -> list[dict[str, Any]]:
    """The states after two steps."""

    def worker(transport: LocalTransport) -> dict[str, Any]:
        engine = engine_of(transport, grid, **arguments)
        for step in range(2):
            reduced(engine, gradients_of(step, transport.rank))
            engine.settle()
        state = engine.state_dict()
        engine.disconnect()
        return state

    return run_ranks(grid[0] * grid[1], worker, timeout_s=60.0)


def loaded(grid: tuple[int, int], states: list[dict[str, Any]], **arguments: Any) -> list[Any]:
    """The states that the first step finds, which it leaves as they were."""

    def worker(transport: LocalTransport) -> dict[str, Any]:
        engine = engine_of(transport, grid, **arguments)
        engine.load_state_dict(states[transport.rank], strict=False)
        reduced(engine, gradients_of(9, transport.rank))
        engine.settle(engine.residuals.changed)
        state = engine.state_dict()
        engine.disconnect()
        return state

    return run_ranks(grid[0] * grid[1], worker, timeout_s=60.0)


@pytest.mark.parametrize("kind", ["local", "global"])
def test_shards_go_on_in_any_shape(kind: str) -> None:
    arguments = {"momentum": 0.5, "momentum_kind": kind}
    states = trained((2, 2), **arguments)
    expected = sums_of(states)
    for part in ("residual", "momentum"):
        assert all(expected[part][name].any() for name in ("a", "b"))
    for grid in ((4, 1), (1, 4), (2, 2)):
        states = loaded(grid, states, **arguments)
        for part, tensors in sums_of(states).items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[part][name], rtol=1e-6, atol=1e-4)


def test_a_shard_is_zero_where_it_is_not() -> None:
    """What a rank saves of a tensor is its own shard of it."""
    states = trained((2, 2))
    first, second = states[:2]
    assert first["residual"]["a"].any()
    assert second["residual"]["a"].any()
    for name in SHAPES:
        both = (first["residual"][name] != 0) & (second["residual"][name] != 0)
        assert not both.any()


@pytest.mark.parametrize("name", ["oktopk", "dgc", "exdyna"])
def test_what_is_loaded_goes_on_bit_for_bit(name: str) -> None:
    def worker(transport: LocalTransport) -> list[dict[str, Tensor]]:
        engine = engine_of(transport, (2, 2), name)
        for step in range(3):
            reduced(engine, gradients_of(step, transport.rank))
            engine.settle()
        state = pickle.loads(pickle.dumps(engine.state_dict()))
        straight = [reduced(engine, gradients_of(3, transport.rank))]
        engine.settle()
        engine.load_state_dict(state)
        straight.append(reduced(engine, gradients_of(3, transport.rank)))
        engine.disconnect()
        return straight

    for one, other in run_ranks(4, worker, timeout_s=60.0):
        assert all(torch.equal(one[key], other[key]) for key in SHAPES)


def test_a_checkpoint_of_two_hosts_goes_on_in_other_worlds(tmp_path: Path) -> None:
    def save(transport: LocalTransport) -> dict[str, Any]:
        engine = engine_of(transport, (2, 2))
        reduced(engine, gradients_of(0, transport.rank))
        engine.settle()
        state = engine.state_dict()
        save_checkpoint(tmp_path, lambda: state, transport.rank, 4, gather_over(transport))
        engine.disconnect()
        return state

    expected = sums_of(run_ranks(4, save, timeout_s=60.0))["residual"]
    for grid in ((1, 2), (3, 2), (1, 1)):

        def load(transport: LocalTransport, grid: tuple[int, int] = grid) -> dict[str, Any]:
            engine = engine_of(transport, grid)
            P = grid[0] * grid[1]
            part = load_checkpoint(tmp_path, transport.rank, P, gather_over(transport))
            engine.load_state_dict(part.state, strict=False)
            reduced(engine, gradients_of(9, transport.rank))
            engine.settle(engine.residuals.changed)
            state = engine.state_dict()
            engine.disconnect()
            return state

        found = sums_of(run_ranks(grid[0] * grid[1], load, timeout_s=60.0))["residual"]
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize("bucket_numel", [10_000, 300])
def test_tensors_leave_and_come_back_by_shards(
    bucket_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten, frozen and turned dense: each rank's part of a tensor, wherever it is cut.

    Also where its rows lie in several buckets, each with shards of its own.
    """

    monkeypatch.setattr("hvd_sparse.engine.bucketing.LEAST_CUT_NUMEL", 300)

    def worker(transport: LocalTransport) -> list[dict[str, Any]]:
        engine = Engine(METHODS["topk"](density=0.05, bucket_numel=bucket_numel).make())
        engine.connect(transport)
        engine.hosts = Hosts(transport, regular_grid(2, 2, transport.rank))
        rank, states = transport.rank, []

        def step(number: int, frozen: str = "") -> None:
            for name, gradient in gradients_of(number, rank).items():
                spec = TensorSpec(name, SHAPES[name], "torch.float32")
                held = torch.zeros_like(gradient) if name == frozen else gradient
                engine.submit(spec, held, frozen=name == frozen)
            engine.scale = engine.scale or 1.0
            applied = {name: engine.result(name).clone() for name in SHAPES}
            engine.settle()
            states.append({**engine.state_dict(), "applied": applied})

        step(0)
        step(1, frozen="a")  # cut by the shards' border
        step(2)
        engine.forget(["a"])
        states.append(engine.state_dict())
        engine.reassign(_Without("b", engine.assignment))
        states.append({"residual": {"b": engine.residuals.leftover("b")}, "momentum": {}})
        engine.disconnect()
        return states

    histories = run_ranks(4, worker, timeout_s=60.0)
    first, frozen, thawed, forgotten, dense = (
        sums_of(list(s)) for s in zip(*histories, strict=True)
    )
    for name in SHAPES:
        came = sum(gradients_of(0, rank)[name] for rank in range(4))
        assert torch.equal(histories[0][0]["applied"][name] + first["residual"][name], came)
    assert torch.equal(frozen["residual"]["a"], first["residual"]["a"])
    assert not torch.equal(thawed["residual"]["a"], frozen["residual"]["a"])
    assert not forgotten["residual"]["a"].any()
    assert torch.equal(forgotten["residual"]["b"], thawed["residual"]["b"])
    assert torch.equal(dense["residual"]["b"], thawed["residual"]["b"])


class _Without:
    """An assignment by which one tensor is dense."""

    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner
        self.description = f"{inner.description} without {name}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        """See `Assignment.choice_of`."""
        return Choice(None) if spec.name == self._name else self._inner.choice_of(spec)


def test_two_levels_give_way_to_one_and_come_back() -> None:
    """As after a change of the world: the engine keeps its state, and connects otherwise."""
    method = METHODS["topk"](density=0.05, bucket_numel=600).make()
    engines = [Engine(method) for _ in range(4)]
    sums = []
    for round_, grid in enumerate([(2, 2), None, (1, 4)]):

        def worker(transport: LocalTransport, grid: Any = grid, round_: int = round_) -> Any:
            engine = engines[transport.rank]
            before = engine.state_dict()
            engine.connect(transport)
            engine.hosts = grid and Hosts(transport, regular_grid(*grid, transport.rank))
            results = reduced(engine, gradients_of(round_, transport.rank))
            engine.settle()
            after = engine.state_dict()
            engine.disconnect()
            assert flattened(engine.state_dict()) == flattened(after)
            return before, results, after

        done = run_ranks(4, worker, timeout_s=60.0)
        before, after = (sums_of([each[i] for each in done])["residual"] for i in (0, 2))
        for name in SHAPES:
            came = sum(gradients_of(round_, rank)[name] for rank in range(4))
            assert torch.equal(before[name] + came, done[0][1][name] + after[name])
        sums.append(after)
    assert sums[0]["a"].any()
    assert not sums[2]["a"].any()  # one host applies all that there is
