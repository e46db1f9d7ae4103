"""States from elsewhere: what is not this rank's state of this step is refused by name."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import ConfigError, TransportError
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks

SHAPES = {"large": (30, 40), "small": (257,)}


def engine_of(transport: Transport | None, **arguments: Any) -> Engine:
    arguments = {"density": 0.03, "bucket_numel": 600, "momentum": 0.5, **arguments}
    engine = Engine(METHODS["oktopk"](**arguments).make())
    if transport is not None:
        engine.connect(transport)
    return engine


def train_step(engine: Engine, rank: int, step: int = 0) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for name, shape in SHAPES.items():
        gradient = torch.randint(-99, 100, shape, generator=generator).float()
        engine.submit(TensorSpec(name, shape, "torch.float32"), gradient)
    engine.scale = 1.0
    for name in SHAPES:
        engine.result(name)
    engine.settle()


def states_of(world_size: int, steps: int = 3) -> list[dict[str, Any]]:
    def worker(transport: Transport) -> dict[str, Any]:
        engine = engine_of(transport)
        for step in range(steps):
            train_step(engine, transport.rank, step)
        state = engine.state_dict()
        engine.disconnect()
        return state

    return run_ranks(world_size, worker, timeout_s=60.0)


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return states_of(1)[0]


def test_a_state_says_where_it_comes_from() -> None:
    for rank, state in enumerate(states_of(2)):
        assert (state["version"], state["rank"], state["world_size"], state["step"]) == (
            2,
            rank,
            2,
            3,
        )
        assert state["package"]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        engine_of(None).load_state_dict(torch.load(file, weights_only=True))


def at(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    def put(state: dict[str, Any], value: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return put


HOSTILE = [
    (at("version"), 3, "version must be 2, got 3"),
    (at("version"), True, "version must be 2, got True"),
    (at("package"), None, "package must be"),
    (at("rank"), 1, r"rank must be in \[0, 1\), got 1"),
    (at("rank"), None, "rank and world_size must both be known"),
    (at("rank"), -1, "rank must be a whole number of at least 0, got -1"),
    (at("world_size"), 0, "world_size must be a whole number of at least 1, got 0"),
    (at("step"), -5, "step must be a whole number of at least 0, got -5"),
    (at("step"), None, "step must be a whole number of at least 0, got None"),
    (at("step"), 1.5, "step must be a whole number"),
    (at("unit"), 0.0, "unit must be a finite number above 0, got 0.0"),
    (at("unit"), math.nan, "unit must be a finite number above 0, got nan"),
    (at("residual"), None, "residual must be tensors by name, got NoneType"),
    (at("residual", "large"), None, "residual of 'large' must be a tensor, got NoneType"),
    (at("residual", "large"), torch.zeros(30, 40).double(), "'large' must be a dense torch.float"),
    (at("residual", "large"), torch.full((30, 40), math.nan), "'large' must be finite, got 1200"),
    (at("residual", "large"), torch.full((30, 40), math.inf), "'large' must be finite, got 1200"),
    (at("residual", "large"), torch.eye(30, 40).to_sparse(), "'large' must be a dense"),
    (at("residual", 7), torch.zeros(3), "residual: names must be text, got 7"),
    (at("momentum", "large"), torch.zeros(3), r"momentum of 'large'.*\(30, 40\), got \(3,\)"),
    (at("momentum", "other"), torch.zeros(3), "momentum of 'other' has no residual"),
    (at("buckets"), {}, "buckets must be a list, got dict"),
    (at("buckets", 0), None, "bucket 0 must be a mapping, got NoneType"),
    (at("buckets", 0), {"names": []}, "bucket 0: missing or unknown keys"),
    (at("buckets", 0, "names"), ["x"], "bucket 0: names must have residuals, got 'x'"),
    (at("buckets", 0, "names"), [[]], "bucket 0: names must have residuals"),
    (at("buckets", 0, "kind"), 3, "bucket 0: kind must be text, got 3"),
    (at("buckets", 0, "selector"), None, "bucket 0: selector must be a mapping"),
    (at("more"), 1, r"missing or unknown keys \['more'\]"),
]


@pytest.mark.parametrize(
    ("put", "value", "message"), HOSTILE, ids=[str(place) for place in range(len(HOSTILE))]
)
def test_hostile_states_are_refused(
    state: dict[str, Any], put: Callable[[dict[str, Any], Any], None], value: Any, message: str
) -> None:
    wrong = copy.deepcopy(state)
    put(wrong, value)
    engine = engine_of(None)
    engine.load_state_dict(state)
    with pytest.raises(ConfigError, match=f"state of the compression.*{message}"):
        engine.load_state_dict(wrong)
    assert engine.state_dict()["residual"].keys() == SHAPES.keys()  # what was there stays


@pytest.mark.parametrize("nothing", [None, [], 3, "state"])
def test_what_is_no_state_is_refused(nothing: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping, got"):
        engine_of(None).load_state_dict(nothing)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9) | st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.builds(
        torch.full,
        st.lists(st.sampled_from([0, 1, 30, 40, 257]), max_size=3).map(tuple),
        st.floats(width=16),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
    ),
    st.lists(st.integers(-2, 1300), max_size=2).map(torch.tensor).map(torch.Tensor.long),
    st.just(object()),
)


def places(value: Any) -> list[tuple[Any, ...]]:
    """The paths to everything in a state."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [(), *((key, *rest) for key, inner in items for rest in places(inner))]


@pytest.fixture(scope="module")
def two_states() -> list[dict[str, Any]]:
    return states_of(2)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_a_state_holds_it_is_refused_by_name_or_trained_on(
    two_states: list[dict[str, Any]], data: st.DataObject
) -> None:
    """On both ranks something else in the same place, a key too many, or a key that is missing."""
    path = data.draw(st.sampled_from([place for place in places(two_states[0]) if place]))
    what = data.draw(st.sampled_from(["replaced", "removed", "added"]))
    value = data.draw(ANYTHING)
    key = data.draw(st.text(max_size=3) | st.integers())

    def hostile(state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        inner: Any = state
        for step in path[:-1]:
            inner = inner[step]
        if what == "replaced":
            inner[path[-1]] = value
        elif what == "added" and isinstance(inner, dict):
            inner[key] = value
        else:
            del inner[path[-1]]
        return state

    def worker(transport: Transport) -> str:
        engine = engine_of(transport)
        try:
            engine.load_state_dict(hostile(two_states[transport.rank]), shapes=SHAPES)
            train_step(engine, transport.rank, 3)
            residual = engine.state_dict()["residual"]
        except ConfigError as error:
            transport.abort(error)  # the other rank may have nothing to refuse
            return str(error)
        except TransportError:
            return "the other rank"
        finally:
            engine.disconnect()
        return "" if all(t.isfinite().all() for t in residual.values()) else "it is not finite"

    outcomes = run_ranks(2, worker, timeout_s=20.0)
    refused = [outcome for outcome in outcomes if "state of the compression: " in outcome]
    assert refused or outcomes == ["", ""], outcomes
    assert set(outcomes) <= {"", "the other rank", *refused}, outcomes


@pytest.mark.parametrize("key", ["residual", "momentum", "step", "buckets", "rank", "unit"])
def test_a_missing_key_is_named(state: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"missing or unknown keys \['{key}'\]"):
        engine_of(None).load_state_dict({k: v for k, v in state.items() if k != key})


SELECTOR_FAULTS = [
    ({}, "selector: missing or unknown keys"),
    ({"step": "x", "threshold": 1.0}, "selector: step must be a whole number"),
    ({"step": -1, "threshold": 1.0}, "selector: step must be a whole number"),
    ({"step": 1, "threshold": math.nan}, "threshold must be a number of at least 0, got nan"),
    ({"step": 1, "threshold": None}, "threshold must be a number of at least 0, got None"),
]


@pytest.mark.parametrize(("selector", "message"), SELECTOR_FAULTS)
def test_a_bucket_that_cannot_go_on_is_refused_on_every_rank(
    selector: dict[str, Any], message: str
) -> None:
    states = states_of(2)
    states[1]["buckets"][0]["selector"] = selector

    def worker(transport: Transport) -> None:
        engine = engine_of(transport)
        engine.load_state_dict(states[transport.rank])
        with pytest.raises(ConfigError, match=f"rank 1: .*{message}"):
            train_step(engine, transport.rank)
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)


def test_swapped_files_are_refused() -> None:
    states = states_of(2)

    def worker(transport: Transport) -> None:
        engine = engine_of(transport)
        with pytest.raises(ConfigError, match=r"that of rank (\d) of 2, got that of rank (?!\1)"):
            engine.load_state_dict(states[1 - transport.rank])
        engine.disconnect()
        engine.load_state_dict(states[1 - transport.rank])  # nobody knows the rank yet
        assert engine.state_dict()["rank"] == 1 - transport.rank

    run_ranks(2, worker, timeout_s=60.0)


def refused_in_the_next_step(
    states: list[dict[str, Any] | None], message: str, world_size: int
) -> None:
    def worker(transport: Transport) -> None:
        engine = engine_of(None)
        loaded = states[transport.rank]
        if loaded is not None:
            engine.load_state_dict(loaded)
        engine.connect(transport)
        for _ in range(2):  # it stays refused
            with pytest.raises(ConfigError, match=message):
                train_step(engine, transport.rank)
        assert (engine.state_dict()["step"] > 0) == (loaded is not None)  # and stays what it was
        engine.disconnect()

    run_ranks(world_size, worker, timeout_s=60.0)


def test_what_one_rank_cannot_see_is_refused_on_all() -> None:
    two, later = states_of(2), states_of(2, steps=4)
    refused_in_the_next_step([two[1], two[0]], "rank 0: .*that of rank 0 of 2, got", 2)
    refused_in_the_next_step([two[0], later[1]], "step must be the same.*rank 0 3, rank 1 4", 2)
    refused_in_the_next_step([two[0], None], "all ranks must load one, but rank 1 has not", 2)
    three = states_of(3)
    refused_in_the_next_step(three[:2], "that of rank 0 of 2, got that of rank 0 of 3", 2)


def test_a_worker_that_joins_draws_the_same_entries_as_the_others() -> None:
    """It has not seen the others' draws: all begin anew."""
    numel = 10_000
    spec = TensorSpec("w", (numel,), "torch.float32")
    method = METHODS["randomk"](density=0.01, collective="topk_allgather").make()

    def train(transport: Transport) -> tuple[list[int], dict[str, Any]]:
        engine = Engine(method)
        state = states[transport.rank] if transport.rank < len(states) else None
        if state is not None:
            engine.load_state_dict(state, strict=False)
        engine.connect(transport)
        engine.scale, applied = 1.0, []
        for _ in range(3):
            engine.submit(spec, torch.ones(numel))
            applied.append(int(engine.result("w").count_nonzero()))
            engine.settle()
        state = engine.state_dict()
        engine.disconnect()
        return applied, state

    states: list[dict[str, Any]] = []
    before = run_ranks(2, train, timeout_s=60.0)
    assert [applied for applied, _ in before] == [[100] * 3] * 2
    states = [state for _, state in before]
    assert [applied for applied, _ in run_ranks(3, train, timeout_s=60.0)] == [[100] * 3] * 3


def test_tensors_of_other_names_are_refused_or_counted(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="residual of 'large': there is no such parameter"):
        engine_of(None).load_state_dict(state, shapes={"small": (257,), "new": (5,)})
    with pytest.raises(ConfigError, match=r"'large': shape must be \(40, 30\), got \(30, 40\)"):
        engine_of(None).load_state_dict(state, shapes={**SHAPES, "large": (40, 30)})

    def worker(transport: Transport) -> None:
        engine = engine_of(transport)
        with pytest.warns(UserWarning, match="dropped residuals of large: L1 norm"):
            engine.load_state_dict(state, strict=False, shapes={"small": (257,)})
        assert engine.state_dict()["residual"].keys() == {"small"}
        lost = float(state["residual"]["large"].double().abs().sum())
        assert engine.stats().dropped_l1 == lost > 0
        train_step(engine, 0)
        engine.disconnect()

    run_ranks(1, worker, timeout_s=60.0)
