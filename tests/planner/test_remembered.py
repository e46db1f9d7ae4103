"""A plan survives: in states and in a file, for the very place where it was found."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse import Compression
from hvd_sparse.engine import Method, TensorSpec
from hvd_sparse.errors import ConfigError, PlanError
from hvd_sparse.methods import METHODS
from hvd_sparse.planner import PlanCache, Planner, World, default_path
from hvd_sparse.planner import planner as planner_module
from hvd_sparse.planner.costs import Line, MethodCosts, Place, Profile
from hvd_sparse.planner.planner import RECALLED_REVIEW_STEPS
from hvd_sparse.planner.remembered import (
    MOST_ENTRIES,
    Key,
    Remembered,
    recall,
)
from hvd_sparse.planner.trial import TIMED_STEPS, TURN_STEPS
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tests.plans import AllDense

TOPK = METHODS["topk"](density=0.001).make()
SPECS = [TensorSpec(name, (1000, 100), "torch.float32") for name in ("last", "first")]
LINE = Line(1e-4, 1e-10)
COSTS = Profile(
    Place("a processor", 2, "local", "2"),
    Line(1e-3, 1e-7),
    {TOPK.id: MethodCosts("topk_allgather", 0.001, LINE, LINE, LINE)},
)


class Rules(AllDense):
    """All is the planner's."""

    description = "all"

    def candidates_of(self, spec: TensorSpec) -> tuple[Method, ...]:
        return (TOPK,)


class Measured:
    """Counts measurements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: list[int] = []
        monkeypatch.setattr(planner_module, "measure_profile", self.measure)

    def measure(self, transport: Transport, *_: object) -> Profile:
        self.ranks.append(transport.rank)
        return COSTS


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def decided(
    transport: Transport,
    cache: Path | None,
    state: Mapping[str, Any] | None = None,
    specs: list[TensorSpec] = SPECS,
) -> Planner:
    planner = Planner(Rules(), cache=None if cache is None else PlanCache(cache))
    if state is not None:
        planner.load_state_dict(state)
    planner.decide(specs, World(transport, lambda tensor: tensor))
    return planner


def settled(planner: Planner, transport: Transport, sparse_s: float = 0.02) -> Planner:
    while planner.is_trying:
        step_s = sparse_s if planner.current.placements else 0.1
        steps = torch.tensor([[step_s, 0.9 * step_s, 0.0]] * TIMED_STEPS, dtype=torch.float64)
        planner.review(SPECS, {}, steps, transport)
    return planner


def test_a_restart_goes_on_with_the_plan(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0's file decides, whatever the others have; nothing is measured, nothing is tried."""

    def first(transport: Transport) -> str:
        path = tmp_path / f"rank-{transport.rank}" / "plans.json"
        return settled(decided(transport, path), transport).description

    def again(transport: Transport) -> tuple[str, int, bool]:
        planner = decided(transport, tmp_path / f"rank-{2 * transport.rank}" / "plans.json")
        assert planner.profile is not None
        return planner.description, planner.steps_to_review, planner.is_trying

    (plan, *others) = run_ranks(3, first)
    assert others == [plan] * 2
    assert "all dense" not in plan
    assert sorted(measured.ranks) == [0, 1, 2]
    assert not (tmp_path / "rank-1").exists()  # rank 0 alone writes
    assert (
        "Planner: topk collective=auto density=0.001 for 2 tensors in " in capsys.readouterr().err
    )
    assert run_ranks(3, again) == [(plan, RECALLED_REVIEW_STEPS, False)] * 3
    assert sorted(measured.ranks) == [0, 1, 2]
    assert (
        "Planner: using the remembered plan, topk collective=auto density"
        in capsys.readouterr().err
    )


def test_a_state_has_the_plan(measured: Measured) -> None:
    """On every rank; that of rank 0 decides, and a rank without one follows."""

    def worker(transport: Transport) -> tuple[str, str]:
        planner = settled(decided(transport, None), transport)
        state = json.loads(json.dumps(planner.state_dict()))  # plain containers
        late = decided(transport, None, state if transport.rank == 0 else None)
        assert not late.is_trying
        assert late.before is not None
        assert late.before.placements == late.current.placements
        assert late.state_dict() == state
        return planner.description, late.description

    for plan, recalled in run_ranks(2, worker):
        assert plan == recalled
    assert sorted(measured.ranks) == [0, 1]


def test_a_trial_that_was_cut_off_is_begun_anew_without_measuring(
    tmp_path: Path, measured: Measured
) -> None:
    def worker(transport: Transport) -> None:
        decided(transport, tmp_path / "plans.json")
        planner = decided(transport, tmp_path / "plans.json")
        assert planner.is_trying
        assert planner.steps_to_review == TURN_STEPS

    run_ranks(2, worker)
    assert sorted(measured.ranks) == [0, 1]


def test_a_state_of_a_trial_does_not_hide_what_came_of_it(
    tmp_path: Path, measured: Measured
) -> None:
    """Saved before the trial was over; the cache knows its end."""

    def worker(transport: Transport) -> None:
        planner = decided(transport, tmp_path / "plans.json")
        state = planner.state_dict()
        plan = settled(planner, transport).description
        late = decided(transport, tmp_path / "plans.json", state)
        assert not late.is_trying
        assert late.description == plan

    run_ranks(2, worker)
    assert sorted(measured.ranks) == [0, 1]


def test_a_state_is_saved_again_before_the_ranks_have_met(measured: Measured) -> None:
    """And only until then: later the plan that holds is saved, on every rank."""
    (state,) = run_ranks(1, lambda t: settled(decided(t, None), t).state_dict())
    early = Planner(Rules())
    early.load_state_dict(state)
    assert early.state_dict() == state

    def worker(transport: Transport) -> None:
        late = decided(transport, None, state)  # of another world, so that it begins a trial
        assert late.is_trying
        assert late.state_dict()["placements"] == {}
        assert late.before is not None
        assert late.before.placements

    run_ranks(2, worker)


def test_a_rank_that_joins_is_told_by_what_the_others_train(measured: Measured) -> None:
    """Momenta change sides on all ranks alike; a rank that has none sends zeros."""
    (survivor,) = run_ranks(1, lambda t: settled(decided(t, None), t))
    plan = dict(survivor.current.placements)
    assert plan

    def worker(transport: Transport) -> None:
        planner = survivor if transport.rank == 0 else Planner(Rules())
        planner.decide(SPECS, World(transport, lambda tensor: tensor))
        assert planner.before is not None
        assert planner.before.placements == plan

    run_ranks(2, worker)


@pytest.mark.parametrize(("seen", "left"), [(0, 100), (70, 30), (500, 0)])
def test_a_trial_waits_for_what_is_left_of_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, measured: Measured, seen: int, left: int
) -> None:
    method = METHODS["topk"](density=0.001, warmup_steps=100).make()
    monkeypatch.setattr(f"{__name__}.TOPK", method)
    costs = {method.id: next(iter(COSTS.methods.values()))}
    monkeypatch.setattr(f"{__name__}.COSTS", replace(COSTS, methods=costs))

    def worker(transport: Transport) -> None:
        planner = decided(transport, None)
        planner.compressed_steps = seen
        assert planner.steps_to_review == TURN_STEPS
        steps = torch.tensor([[0.1, 0.09, 0.0]] * TIMED_STEPS, dtype=torch.float64)
        planner.review(SPECS, {}, steps, transport)
        assert planner.is_trying
        assert planner.steps_to_review == TURN_STEPS + left

    run_ranks(2, worker)


def test_another_place_measures_anew_and_says_why(
    tmp_path: Path, measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plans.json"
    run_ranks(2, lambda transport: settled(decided(transport, path), transport))
    capsys.readouterr()
    run_ranks(3, lambda transport: decided(transport, path).description)
    assert "plan is for another world_size 2, here 3; measuring again." in capsys.readouterr().err
    others = [replace(spec, shape=(7, 7)) for spec in SPECS]
    run_ranks(2, lambda transport: decided(transport, path, specs=others).description)
    assert "another" not in capsys.readouterr().err  # another model has its own
    assert len(measured.ranks) == 2 + 3 + 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"policy": "x"}, "policy"),
        ({"package": "0.0"}, "package '0.0', here '1'"),
        ({"place": replace(COSTS.place, device="NVIDIA H200")}, "device 'NVIDIA H200', here 'cpu'"),
        ({"place": replace(COSTS.place, transport="mpi")}, "transport 'mpi', here 'local'"),
        ({"place": replace(COSTS.place, torch="1.9")}, "torch '1.9', here '2'"),
    ],
)
def test_every_part_of_the_key_counts(changed: dict[str, Any], words: str) -> None:
    key = Key("model", "policy", "1", COSTS.place)
    assert recall(key, [Remembered(replace(key, **changed), COSTS)]) == (None, words)
    assert recall(key, [Remembered(key, COSTS)]) == (Remembered(key, COSTS), "")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\x00", b'{"version": 2, "entries": [{}]}', b"[" * 100_000]
)
def test_a_damaged_file_is_a_warning(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"cannot read .*plans.json, and measures anew"):
        assert PlanCache(path).read() == []
    found = Remembered(Key("m", "p", "1", COSTS.place), COSTS)
    with pytest.warns(UserWarning, match="cannot read"):
        PlanCache(path).add(found)
    assert PlanCache(path).read() == [found]


def test_a_damaged_number_is_a_warning(tmp_path: Path, measured: Measured) -> None:
    path = tmp_path / "plans.json"
    run_ranks(2, lambda t: settled(decided(t, path), t).description)
    good = path.read_text()
    assert '"chosen": ' in good
    path.write_text(re.sub(r'"chosen": \d+', '"chosen": 1e999', good))
    with pytest.warns(UserWarning, match=r"measures anew: .*OverflowError"):
        assert PlanCache(path).read() == []
    path.write_text(good.replace('"first"', '"gone"'))
    with pytest.warns(UserWarning, match=r"plan is for gone, which the model has not: measuring"):
        assert run_ranks(2, lambda t: decided(t, path).is_trying) == [True, True]


def test_a_planner_says_what_it_does_though_nobody_can_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        planner_module.tell("nothing")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = Remembered(Key("m", "p", "1", COSTS.place), COSTS)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "file" / "plans.json", tmp_path / "pipe", tmp_path / "with\0nul"):
        with pytest.warns(UserWarning, match=r"cannot write .*, and forgets its plan"):
            PlanCache(path).add(found)


def test_the_file_stays_small_and_keeps_the_last(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans.json")
    for number in range(MOST_ENTRIES + 3):
        cache.add(Remembered(Key(str(number), "p", "1", COSTS.place), COSTS))
    cache.add(Remembered(Key("5", "p", "1", COSTS.place), COSTS))
    kept = [found.key.model for found in cache.read()]
    assert kept == [*(str(n) for n in range(3, MOST_ENTRIES + 3) if n != 5), "5"]
    assert os.listdir(tmp_path) == ["plans.json"]


def test_a_file_of_another_release_is_refused_by_name(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "plans.json")
    cache.path.write_text('{"version": 1, "entries": []}')
    told = r"cannot read .*plans.json, and measures anew: .*version must be 2, got 1"
    with pytest.warns(UserWarning, match=told):
        assert cache.read() == []


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/hvd_sparse/plans.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path() == Path.home() / ".cache/hvd_sparse/plans.json"


def test_a_state_that_is_none_is_left_out(measured: Measured) -> None:
    def worker(transport: Transport) -> None:
        assert decided(transport, None, {"placements": {}, "found": {"key": 3}}).is_trying

    with pytest.warns(UserWarning, match="the state's plan cannot be read"):
        run_ranks(2, worker)


def test_a_plan_of_methods_that_a_rank_has_not_is_refused(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    run_ranks(2, lambda transport: settled(decided(transport, path), transport))
    other = METHODS["topk"](density=0.5).make()

    def worker(transport: Transport) -> str:
        planner = Planner(Rules(), cache=PlanCache(path))
        if transport.rank == 1:
            monkeypatch.setattr(planner.rules, "candidates_of", lambda spec: (other,))
        try:
            planner.decide(SPECS, World(transport, lambda tensor: tensor))
        except PlanError as error:
            return str(error)
        return ""

    fine, refused = run_ranks(2, worker)
    assert (fine, refused.startswith("rank 0 plans for topk")) == ("", True)


def test_what_is_no_plan_is_named() -> None:
    wrong: list[Any] = [None, [], {"key": {}}, {"key": {"model": 1}}]
    for data in wrong:
        with pytest.raises(ConfigError, match="not a plan: "):
            Remembered.from_json(data)


def test_what_was_remembered_is_read(tmp_path: Path, measured: Measured) -> None:
    def worker(transport: Transport) -> Tensor | None:
        planner = settled(decided(transport, tmp_path / "plans.json"), transport)
        found = Remembered.from_json(planner.state_dict()["found"])
        assert found.outcome is not None
        assert found.outcome.best.methods == (TOPK.id,)
        assert found.outcome.plan == planner.plan
        assert found.profile == planner.profile
        assert Remembered.from_json(json.loads(json.dumps(found.to_json()))) == found
        if transport.rank == 0:
            assert PlanCache(tmp_path / "plans.json").read() == [found]
        return None

    run_ranks(2, worker)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user id is in no file: nothing is written beside the script."""

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() is not None
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert default_path() is None
    rules = {"version": 1, "rules": [{"compress": "auto", "compressor": "topk"}]}
    method = Compression.from_policy(policy=rules).method
    assert isinstance(method, Planner)
    assert method.cache is None
