"""The planner: costs as lines, the search by them, and one plan on all ranks whatever happens."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import OkTopk, TopkAllgather
from hvd_sparse.collectives.two_levels import Levels
from hvd_sparse.cost_model import Link
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.errors import ConfigError, PeerLostError, PlanError
from hvd_sparse.lab.offline_plan import profiles_of_hosts, verdict
from hvd_sparse.planner import Planner, World
from hvd_sparse.planner import planner as planner_module
from hvd_sparse.planner.choose import (
    ChosenPlan,
    Job,
    Placement,
    TimedTensor,
    choose_plan,
    contenders,
    finish_s,
    predict,
)
from hvd_sparse.planner.costs import Line, MethodCosts, Place, Profile, fit_line
from hvd_sparse.planner.measure import measure_profile
from hvd_sparse.planner.trial import TIMED_STEPS, TURN_STEPS, Trial, Turn, lateness, slowest
from hvd_sparse.selectors import ExactTopK
from hvd_sparse.transports import LocalWorld, Transport
from hvd_sparse.transports.local import run_ranks
from tests.plans import AllDense

GATHER = Method(0.01, 1 << 23, ExactTopK, TopkAllgather, "gather 0.01")
OKTOPK = Method(0.01, 1 << 23, ExactTopK, OkTopk, "oktopk 0.01")
HERE = Place("a processor", 4, "local", "2.13.0")
SHAPES = {"conv": (64, 64, 3, 3), "norm": (64,), "fc": (1000, 2000), "bias": (2000,)}
SPECS = [TensorSpec(name, shape, "torch.float32") for name, shape in SHAPES.items()]


def costs(fixed_s: float, per_element_s: float, collective: str = "topk_allgather") -> MethodCosts:
    """Encoding, exchanging and decoding share the cost alike."""
    line = Line(fixed_s / 3, per_element_s / 3)
    return MethodCosts(collective, 0.01, line, line, line)


def profile(dense: Line, gather: MethodCosts, oktopk: MethodCosts) -> Profile:
    return Profile(HERE, dense, {GATHER.id: gather, OKTOPK.id: oktopk})


SLOW_NETWORK = profile(Line(5e-4, 2e-8), costs(1e-3, 1e-9), costs(4e-3, 2e-9, "oktopk"))
FAST_NETWORK = profile(Line(1e-4, 5e-10), costs(1e-3, 1e-9), costs(4e-3, 2e-9, "oktopk"))


def planned(
    ready_s: dict[str, float] | None = None, candidates: tuple[Method, ...] = (GATHER, OKTOPK)
) -> list[TimedTensor]:
    return [TimedTensor(spec, (ready_s or {}).get(spec.name, 0.0), candidates) for spec in SPECS]


# -- lines and predictions -------------------------------------------------------------------------


def test_a_line_through_exact_points() -> None:
    line = fit_line([1 << 10, 1 << 15, 1 << 20], [1e-3 + 2e-9 * (1 << p) for p in (10, 15, 20)])
    assert (line.fixed_s, line.per_element_s) == pytest.approx((1e-3, 2e-9))
    assert line.at(1000) == pytest.approx(1e-3 + 2e-6)


@pytest.mark.parametrize("seconds", [[1e-5, 1e-1], [2e-3, 1e-3], [5e-4, 5e-4]])
def test_no_part_of_a_line_is_negative(seconds: list[float]) -> None:
    line = fit_line([1000, 100_000], seconds)
    assert line.fixed_s >= 0
    assert line.per_element_s >= 0
    assert line.at(50_000) >= min(seconds) / 2


def test_reductions_follow_one_another_as_they_become_ready() -> None:
    assert finish_s([], 2.0) == 2.0
    assert finish_s([Job(0.0, 1.0), Job(0.5, 1.0), Job(5.0, 1.0)], 0.5) == 6.5
    assert finish_s([Job(1.0, 1.0), Job(0.0, 3.0)], 0.0) == 4.0


def test_equation_1() -> None:
    found = verdict(SLOW_NETWORK, SLOW_NETWORK.methods[GATHER.id], 1_000_000)
    assert found.dense_s == pytest.approx(20.5e-3)
    assert found.encode_decode_s == pytest.approx(2 / 3 * 2e-3)
    assert found.sparse_s == pytest.approx(2e-3)
    assert found.holds
    assert not verdict(SLOW_NETWORK, SLOW_NETWORK.methods[GATHER.id], 100).holds
    assert not verdict(FAST_NETWORK, FAST_NETWORK.methods[GATHER.id], 1_000_000).holds


def test_the_large_ones_are_compressed_where_the_network_is_slow() -> None:
    plan = choose_plan(SLOW_NETWORK, planned())
    assert plan.placements["fc"].method == GATHER.id
    assert "norm" not in plan.placements or plan.placements["norm"] == plan.placements["fc"]
    assert plan.predicted_s < 0.2 * plan.dense_s
    assert plan.dense_s == pytest.approx(5e-4 + 2e-8 * sum(spec.numel for spec in SPECS))
    assert plan.predicted_s >= SLOW_NETWORK.methods[GATHER.id].seconds(2_000_000)


def test_nothing_is_where_it_is_fast() -> None:
    plan = choose_plan(FAST_NETWORK, planned())
    assert not plan.placements
    assert plan.predicted_s == plan.dense_s


def test_a_small_gain_is_not_worth_the_risk() -> None:
    numel = sum(spec.numel for spec in SPECS)
    level = profile(Line(0.0, 1e-8), costs(0.0, 0.95e-8), costs(0.0, 0.95e-8))
    assert not choose_plan(level, planned()).placements
    better = profile(Line(0.0, 1e-8), costs(0.0, 0.85e-8), costs(0.0, 0.95e-8))
    plan = choose_plan(better, planned())
    assert len(plan.placements) == len(SPECS)
    assert plan.predicted_s == pytest.approx(0.85e-8 * numel)


def coming(**ready_s: float) -> list[TimedTensor]:
    """Tensors of a million elements, 20 ms dense and 2 ms sparse by the slow network."""
    return [
        TimedTensor(TensorSpec(name, (1_000_000,), "torch.float32"), at_s, (GATHER,))
        for name, at_s in ready_s.items()
    ]


def test_buckets_are_formed_so_that_backward_hides_them() -> None:
    """Two tensors whose gradients come apart: the first need not wait for the second."""
    plan = choose_plan(SLOW_NETWORK, coming(late=0.1, early=0.095))
    assert plan.placements["early"].bucket != plan.placements["late"].bucket
    assert plan.predicted_s == pytest.approx(0.1 + 2e-3 + 5e-4)
    plan = choose_plan(SLOW_NETWORK, coming(late=0.0, early=0.0))
    assert plan.placements["early"].bucket == plan.placements["late"].bucket


@pytest.mark.parametrize(
    ("late_s", "compressed"),
    [(0.0, {"early", "middle", "late"}), (0.041, {"late"}), (0.03, {"middle", "late"})],
)
def test_only_what_comes_too_late_to_hide_is_compressed(
    late_s: float, compressed: set[str]
) -> None:
    """Two tensors take 40 ms; where the third comes after that, it alone is waited for."""
    plan = choose_plan(SLOW_NETWORK, coming(late=late_s, middle=late_s / 2, early=0.0))
    assert set(plan.placements) == compressed


def test_methods_are_mixed_where_each_is_best_for_its_part() -> None:
    """One is cheap for what is large, the other where backward has just ended."""
    by_size = profile(Line(5e-4, 2e-8), costs(3e-3, 1e-10), costs(1e-4, 2e-9, "oktopk"))
    specs = {"large": (30_000_000, 0.0), "last": (200_000, 0.05)}
    tensors = [
        TimedTensor(TensorSpec(name, (numel,), "torch.float32"), at_s, (GATHER, OKTOPK))
        for name, (numel, at_s) in specs.items()
    ]
    plan = choose_plan(by_size, tensors)
    assert plan.placements["large"].method == GATHER.id
    assert plan.placements["last"].method == OKTOPK.id
    assert plan.placements == contenders(by_size, tensors, 3)[0].placements


def test_a_model_of_hundreds_of_tensors_is_planned_in_few_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While rank 0 searches, all others wait."""
    predictions = []

    def counted(*arguments: Any) -> float:
        predictions.append(arguments)
        return predict(*arguments)

    monkeypatch.setattr("hvd_sparse.planner.choose.predict", counted)
    tensors = [
        TimedTensor(
            TensorSpec(str(i), (1000 * (1 + i * i % 97),), "torch.float32"),
            i * 1e-3,
            (GATHER, OKTOPK),
        )
        for i in range(400)
    ]
    contenders(SLOW_NETWORK, tensors, 3)
    assert len(predictions) < 8000


def test_everything_in_one_bucket_is_tried_too() -> None:
    """Whatever is predicted: here, that a bucket each is best, since gradients come far apart."""
    specs = [TensorSpec(name, (1_000_000,), "torch.float32") for name in ("late", "early")]
    tensors = [
        TimedTensor(spec, ready_s, (GATHER, OKTOPK))
        for spec, ready_s in zip(specs, (0.1, 0.0), strict=True)
    ]
    for most in (2, 3):
        plans = contenders(SLOW_NETWORK, tensors, most)
        assert len(plans) == most
        assert plans == sorted(plans, key=lambda plan: plan.predicted_s)
        everything = [plan for plan in plans if plan.placements.keys() == {"late", "early"}]
        assert [len(set(plan.placements.values())) for plan in everything] == [1]
        assert everything[0].placements["late"].method == GATHER.id


def test_tensors_without_candidates_and_without_elements_stay_dense() -> None:
    tensors = [
        TimedTensor(SPECS[2], 0.0, ()),
        TimedTensor(TensorSpec("empty", (0, 5), "torch.float32"), 0.0, (GATHER,)),
    ]
    assert not choose_plan(SLOW_NETWORK, tensors).placements
    assert choose_plan(SLOW_NETWORK, []).predicted_s == SLOW_NETWORK.dense.fixed_s


def test_a_method_without_costs_is_named() -> None:
    other = Method(0.5, 1, ExactTopK, TopkAllgather, "gather 0.5")
    with pytest.raises(ConfigError, match=r"no costs of 'gather 0.5', only of gather 0.01"):
        choose_plan(SLOW_NETWORK, planned(candidates=(other,)))


# -- profiles --------------------------------------------------------------------------------------


def test_a_profile_is_saved_and_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    SLOW_NETWORK.save(path)
    assert Profile.load(path) == SLOW_NETWORK
    assert Profile.load(path).carried_over(HERE) == SLOW_NETWORK


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 3}', '{"version": 1}', "null"])
def test_what_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile.json: "):
        Profile.load(path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("dense", {"fixed_s": None, "per_element_s": 0.0}, "fixed_s must be a finite number of at"),
        ("dense", {"fixed_s": 1, "per_element_s": float("nan")}, "per_element_s must be a finite"),
        ("dense", {"fixed_s": -1.0, "per_element_s": 0.0}, "fixed_s must be a finite number of at"),
        ("density", "0.01", "density must be in"),
        ("wire", {"index_bytes": 0}, "index_bytes must be a finite number above 0, got 0"),
        ("place", {"world_size": "4"}, "world_size must be a whole number of at least 1, got '4'"),
    ],
)
def test_figures_of_a_profile_are_checked(part: str, value: Any, message: str) -> None:
    data = SLOW_NETWORK.to_json()
    (costs,) = data["methods"][:1]
    if part == "dense":
        data["dense"] = costs["exchange"] = value
    elif part == "place":
        data["place"] |= value
    else:
        costs[part] = value
    with pytest.raises(ConfigError, match=message):
        Profile.from_json(data)


@pytest.mark.parametrize("key", ["host_class", "transport", "torch", "device"])
def test_a_profile_from_elsewhere_is_refused(key: str) -> None:
    changed: dict[str, Any] = {key: "another"}
    elsewhere = replace(HERE, **changed)
    with pytest.raises(ConfigError, match=f"taken elsewhere: {key} .*, here 'another'"):
        SLOW_NETWORK.carried_over(elsewhere)


def test_a_profile_of_another_world_size_is_carried_over_and_says_so() -> None:
    larger = SLOW_NETWORK.carried_over(replace(HERE, world_size=8))
    assert larger.source == "measured on 4 ranks, carried over to 8"
    assert larger.place.world_size == 8
    # TopkA's volume is 2k (P - 1); Rabenseifner's 2n (P-1)/P.
    gather = larger.methods[GATHER.id]
    assert gather.exchange.per_element_s == pytest.approx(1e-9 / 3 * 7 / 3)
    assert gather.encode == SLOW_NETWORK.methods[GATHER.id].encode
    assert larger.dense.per_element_s == pytest.approx(2e-8 * (7 / 8) / (3 / 4))
    unknown = profile(Line(1e-3, 1e-8), costs(0, 1e-9, ""), costs(0, 1e-9))
    with pytest.raises(ConfigError, match=r"profile is of 4 ranks, here are 8.*gather 0.01"):
        unknown.carried_over(replace(HERE, world_size=8))
    alone = Profile(replace(HERE, world_size=1), Line(0, 0), {})
    with pytest.raises(ConfigError, match="one rank says nothing"):
        alone.carried_over(HERE)


def test_a_profile_by_the_cost_model() -> None:
    link = Link(alpha_s=30e-6, beta_s_per_byte=8 / 25e9)
    levels = Levels(64, 1, link, link)
    (made,) = profiles_of_hosts(levels, SLOW_NETWORK.methods)  # each rank is a host: one form
    assert made.dense.fixed_s == pytest.approx(2 * 63 * 30e-6)  # a ring, as Horovod's
    assert made.dense.per_element_s == pytest.approx(2 * 4 * 63 / 64 * 8 / 25e9)
    gather = made.methods[GATHER.id]
    assert gather.exchange.fixed_s == pytest.approx(6 * 30e-6)
    assert gather.exchange.per_element_s == pytest.approx(0.01 * 8 * 63 * 8 / 25e9, rel=1e-3)
    assert gather.encode == SLOW_NETWORK.methods[GATHER.id].encode


def test_a_profile_has_all_that_was_measured() -> None:
    methods = {m.id: m for m in (GATHER, OKTOPK)}

    def worker(transport: Transport) -> Profile:
        return measure_profile(transport, dense_of(transport), methods, HERE, limit_s=0.6)

    for found in run_ranks(2, worker):
        assert set(found.methods) == set(methods)
        assert found.methods[OKTOPK.id].collective == "oktopk"
        assert found.dense.at(1 << 20) > 0
        assert all(c.seconds(1 << 20) > 0 for c in found.methods.values())


# -- one plan on all ranks -------------------------------------------------------------------------


class Rules(AllDense):
    """Everything above 1000 elements is the planner's."""

    description = "above 1000"

    def candidates_of(self, spec: TensorSpec) -> tuple[Method, ...]:
        return (GATHER, OKTOPK) if spec.numel > 1000 else ()


def dense_of(transport: Transport) -> Any:
    return lambda tensor: transport.allreduce_sum(tensor, channel="dense")


def decide(transport: Transport) -> Planner:
    planner = Planner(Rules())
    planner.decide(SPECS, World(transport, dense_of(transport)))
    return planner


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_devices_of_different_speed_follow_rank_0(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank measures something else; alone, they would try other plans."""
    by_rank = [SLOW_NETWORK, FAST_NETWORK, SLOW_NETWORK.calibrated(1.0, 0.1), FAST_NETWORK]

    def first_tried(transport: Transport) -> Planner:
        planner = decide(transport)
        assert planner.plan is not None
        assert not planner.plan.placements
        timed = torch.tensor(
            [[0.1, SLOW_NETWORK.dense.at(2_038_928), 0.0]] * 2, dtype=torch.float64
        )
        assert planner.review(SPECS, {}, (1 + transport.rank) * timed, transport)
        return planner

    def measure(transport: Transport, *_: object) -> Profile:
        sleep(0.02 * transport.rank)
        return by_rank[transport.rank]

    monkeypatch.setattr(planner_module, "measure_profile", measure)
    planners = run_ranks(world_size, first_tried)
    assert len({planner.description for planner in planners}) == 1
    for planner in planners:
        assert planner.choice_of(SPECS[2]).method is GATHER
        assert planner.choice_of(SPECS[1]).method is None


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_while_planning_takes_the_others_with_it(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not after the transport's timeout; and nobody has a plan."""

    def measure(transport: Transport, *_: object) -> Profile:
        if transport.rank == failing:
            raise MemoryError("no memory for the sweep")
        return SLOW_NETWORK

    monkeypatch.setattr(planner_module, "measure_profile", measure)
    world, raised = LocalWorld(3, timeout_s=60.0), {}
    planners = [Planner(Rules()) for _ in range(3)]

    def run(transport: Transport) -> None:
        try:
            planners[transport.rank].decide(SPECS, World(transport, dense_of(transport)))
            transport.allreduce_sum(torch.zeros(1), channel="first step")
        except BaseException as error:
            raised[transport.rank] = type(error), "no memory for the sweep" in str(error)

    start = perf_counter()
    threads = [threading.Thread(target=run, args=(t,)) for t in world.transports()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert perf_counter() - start < 20
    expected = {rank: MemoryError if rank == failing else PeerLostError for rank in range(3)}
    assert raised == {rank: (error_type, True) for rank, error_type in expected.items()}
    assert planners[failing].plan is None
    if failing == 0:
        assert all(planner.plan is None for planner in planners)


def test_a_profile_that_is_no_text_is_named_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff")

    def worker(transport: Transport) -> None:
        with pytest.raises(PlanError, match=r"rank 0 cannot plan: .*profile\.json: "):
            Planner(Rules(), path).decide(SPECS, World(transport, dense_of(transport)))

    run_ranks(2, worker)


def test_a_profile_that_rank_0_cannot_use_is_named_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    SLOW_NETWORK.save(path)

    def worker(transport: Transport) -> None:
        planner = Planner(Rules(), path if transport.rank == 0 else tmp_path / "not there.json")
        with pytest.raises(PlanError, match="rank 0 cannot plan: the profile was taken elsewhere"):
            planner.decide(SPECS, World(transport, dense_of(transport)))

    run_ranks(2, worker)


# -- trials and reviews ----------------------------------------------------------------------------

DENSE_STEP_S = 0.1
REST_S = 0.05


def method_of(planner: Planner) -> str:
    """What the large layer is compressed by."""
    method = planner.choice_of(SPECS[2]).method
    return "dense" if method is None else method.description


def steps_of(step_s: Mapping[str, float], planner: Planner, noise: float = 0.0) -> Tensor:
    """Steps that the plan takes, by its method; every other one longer by `noise`."""
    took = step_s[method_of(planner)]
    rest = [max(0.0, took - REST_S), 0.0]
    rows = [[took * (1 + noise * (i % 2)), *rest] for i in range(TIMED_STEPS)]
    return torch.tensor(rows, dtype=torch.float64)


def settle(planner: Planner, transport: Transport, step_s: Mapping[str, float]) -> list[str]:
    """Train until the trial is over; the plans that had a turn."""
    turns = []
    while planner.is_trying:
        turns.append(method_of(planner))
        planner.review(SPECS, {}, steps_of(step_s, planner), transport)
    return turns


@pytest.mark.parametrize(
    ("gather_s", "oktopk_s", "expected"),
    [
        (0.06, 0.07, "gather 0.01"),  # as predicted
        (0.09, 0.07, "oktopk 0.01"),  # not as predicted
        (0.098, 0.2, "dense"),  # too small a gain
        (0.3, 0.2, "dense"),
    ],
)
def test_what_is_fastest_in_its_trial_stays(
    gather_s: float, oktopk_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: SLOW_NETWORK)
    step_s = {"dense": DENSE_STEP_S, "gather 0.01": gather_s, "oktopk 0.01": oktopk_s}

    def worker(transport: Transport) -> tuple[list[str], str]:
        planner = decide(transport)
        slow = {name: seconds * (1 - 0.1 * transport.rank) for name, seconds in step_s.items()}
        return settle(planner, transport, slow), method_of(planner)

    turns = ["dense", "gather 0.01", "oktopk 0.01"]  # the best predicted first
    for found, stays in run_ranks(3, worker):
        assert found[:3] == turns
        assert stays == expected


def test_the_slowest_rank_counts() -> None:
    ranks = torch.tensor([[[1.0, 0.5, 0], [4.0, 0.25, 0]], [[2.0, 0.125, 0], [3.0, 0.375, 0]]])
    assert slowest(list(ranks)) == [(2.0, 0.5), (4.0, 0.375)]


def test_the_last_gradient_is_the_slowest_ranks() -> None:
    """Rank 1 begins 9 s after rank 0, and its backward takes 3 s longer."""
    early, late = torch.tensor([60.0, 50.0, 20.0]), torch.tensor([60.0, 41.0, 23.0])
    assert lateness([early.expand(5, 3), late.expand(5, 3)]) == 12.0
    assert lateness([late.expand(5, 3), early.expand(5, 3)]) == 9.0
    assert lateness([early.expand(5, 3)]) == 0.0
    in_turns = [torch.stack([early, late] * 4), torch.stack([late, early] * 4)]
    assert lateness(in_turns) == 32.0 - 21.5


def test_no_reduction_is_blamed_for_a_rank_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step waits for a slower rank is there by every plan."""
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: SLOW_NETWORK)
    reduction_s = SLOW_NETWORK.dense.at(sum(spec.numel for spec in SPECS))
    late_s = 0.5

    def worker(transport: Transport) -> tuple[float, float]:
        planner = decide(transport)
        waits_s = late_s if transport.rank == 0 else 0.0
        took = [1.0, reduction_s + waits_s, 0.0]
        steps = torch.tensor([took] * TIMED_STEPS, dtype=torch.float64)
        planner.review(SPECS, {}, steps, transport)
        assert planner.plan is not None
        return planner.plan.dense_s, planner.plan.predicted_s

    for dense_s, predicted_s in run_ranks(2, worker):
        assert dense_s == pytest.approx(late_s + reduction_s, rel=1e-3)
        assert predicted_s > late_s
        assert predicted_s - late_s < 0.7 * reduction_s


def plan_of(seconds: float) -> ChosenPlan:
    return ChosenPlan({"fc": Placement(MethodId(f"in {seconds}"), "0")}, seconds, 1.0)


def turns_of(trial: Trial, noise_s: float) -> int:
    """Let a trial run; each plan takes what it is predicted to, and some noise."""
    turns = 0
    while not trial.is_over:
        middle_s = trial.current.plan.predicted_s
        trial.record([(middle_s + noise_s * (i % 5 - 2), 0.0) for i in range(TIMED_STEPS)])
        trial.go_on()
        turns += 1
    return turns


@pytest.mark.parametrize(
    ("noise_s", "turns", "winner_s"), [(0.0, 7, 0.60), (0.02, 7, 0.60), (10.0, 24, 1.0)]
)
def test_plans_that_noise_does_not_tell_apart_have_further_turns(
    noise_s: float, turns: int, winner_s: float
) -> None:
    """The dense one always, and the two that are alike; with much noise all, for nothing."""
    trial = Trial(ChosenPlan({}, 1.0, 1.0))
    trial.enter([plan_of(0.60), plan_of(0.61), plan_of(0.9)])
    assert turns_of(trial, noise_s) == turns
    assert trial.winner.plan.predicted_s == winner_s
    assert trial.current is trial.winner


def test_the_first_turn_of_all_does_not_count_once_dense_has_another() -> None:
    """Nothing had settled in it; as noise it would hide what a plan gains."""
    trial = Trial(plan_of(1.0))
    trial.enter([plan_of(0.9)])
    trial.record([(1.5, 0.0)] * TIMED_STEPS)
    turns_of(trial, 0.0)
    assert trial.tried[0].took.step_s == 1.0
    assert trial.winner.plan.predicted_s == 0.9


@pytest.mark.parametrize(
    ("step_s", "turn"),
    [(0.0, (3, 8)), (0.5, (3, 8)), (0.6, (2, 6)), (1.0, (1, 4)), (10.0, (1, 3)), (1e9, (1, 3))],
)
def test_a_turn_of_long_steps_has_few(step_s: float, turn: tuple[int, int]) -> None:
    assert Turn.of(step_s) == turn


def test_a_turn_is_as_long_as_its_plan_is_expected_to_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what dense reductions are predicted to take; then by what steps have taken."""
    slow = profile(Line(0.0, 1e-4), costs(0, 1e-9), costs(0, 1e-9))
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: slow)

    def worker(transport: Transport) -> None:
        planner = decide(transport)
        assert (planner.steps_to_review, planner.timed_steps) == (4, 3)
        steps = torch.tensor([[9.0, 8.9, 0.0]] * 3, dtype=torch.float64)
        planner.review(SPECS, {}, steps, transport)
        assert method_of(planner) != "dense"
        assert (planner.steps_to_review, planner.timed_steps) == (TURN_STEPS, TIMED_STEPS)

    run_ranks(2, worker)


def test_dense_that_is_far_slower_has_one_turn() -> None:
    trial = Trial(plan_of(1.0))
    trial.enter([plan_of(0.3)])
    assert turns_of(trial, 0.0) == 2
    assert trial.winner.plan.predicted_s == 0.3


@pytest.mark.parametrize(
    ("factor", "again"), [(1.0, False), (1.2, False), (0.7, True), (3.0, True)]
)
def test_a_trial_is_repeated_where_steps_take_something_else(
    factor: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: SLOW_NETWORK)
    monkeypatch.setattr(planner_module, "REVIEW_INTERVAL_STEPS", 1000)  # trials have their share
    step_s = {"dense": DENSE_STEP_S, "gather 0.01": 0.06, "oktopk 0.01": 0.07}

    def worker(transport: Transport) -> str:
        planner = decide(transport)
        settle(planner, transport, step_s)
        later = {name: factor * seconds for name, seconds in step_s.items()}
        changed = planner.review(SPECS, {}, steps_of(later, planner), transport)
        assert changed == again
        assert planner.is_trying == again
        assert method_of(planner) == ("dense" if again else "gather 0.01")
        settle(planner, transport, {**step_s, "oktopk 0.01": 0.01})
        return method_of(planner)

    assert set(run_ranks(2, worker)) == {"oktopk 0.01" if again else "gather 0.01"}


def test_no_step_is_spent_on_what_cannot_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    hopeless = profile(Line(1e-4, 5e-10), costs(1.0, 1e-7), costs(1.0, 1e-7))
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: hopeless)

    def worker(transport: Transport) -> None:
        planner = decide(transport)
        assert settle(planner, transport, {"dense": DENSE_STEP_S}) == ["dense"]
        assert planner.outcome is not None
        assert [str(each) for each in planner.outcome.tried] == ["dense (100.0 ± 0.0 ms)"]

    run_ranks(2, worker)


def test_the_first_plan_tried_waits_for_the_end_of_the_warmup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: SLOW_NETWORK)
    monkeypatch.setattr(Planner, "_warmup_steps", lambda self: 1000)  # of (GATHER, OKTOPK): 0

    def worker(transport: Transport) -> list[int]:
        planner, waits = decide(transport), []
        for _ in range(3):
            waits.append(planner.steps_to_review)
            planner.review(SPECS, {}, steps_of(defaultdict(lambda: 0.1), planner), transport)
        return waits

    assert run_ranks(1, worker) == [[TURN_STEPS, TURN_STEPS + 1000, TURN_STEPS]]


def test_a_review_knows_when_gradients_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: SLOW_NETWORK)
    specs = [TensorSpec(name, (1_000_000,), "torch.float32") for name in ("late", "early")]

    def worker(transport: Transport, ready_s: Mapping[str, float]) -> bool:
        planner = Planner(Rules())
        planner.decide(specs, World(transport, dense_of(transport)))
        timed = torch.tensor([[0.2, 0.14, 0.0]] * TIMED_STEPS, dtype=torch.float64)
        assert planner.review(specs, ready_s, timed, transport)
        return planner.choice_of(specs[0]).bucket == planner.choice_of(specs[1]).bucket

    together, apart = {"late": 0.0, "early": 0.0}, {"late": 0.1, "early": 0.0}
    assert run_ranks(2, lambda transport: worker(transport, together)) == [True, True]
    assert run_ranks(2, lambda transport: worker(transport, apart)) == [False, False]


def test_planned_training_loses_nothing_when_the_plan_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a whole trial over real engines, to dense in the end: all mass is applied."""
    monkeypatch.setattr(planner_module, "measure_profile", lambda *_: SLOW_NETWORK)
    step_s = {"dense": DENSE_STEP_S, "gather 0.01": 0.3, "oktopk 0.01": 0.2}

    def gradient(rank: int, step: int, spec: TensorSpec) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(-9, 10, spec.shape, generator=generator).float()

    def worker(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        planner = Planner(Rules())
        planner.decide(SPECS, World(transport, dense_of(transport)))
        engine = Engine(planner)
        engine.connect(transport)
        applied = {spec.name: torch.zeros(spec.shape) for spec in SPECS}
        ways = []
        for step in range(8):
            if step and step % 2 == 0:
                planner.review(SPECS, {}, steps_of(step_s, planner), transport)
                engine.reassign(planner)
                engine.agree()
            ways.append(method_of(planner))
            sparse = [spec for spec in SPECS if engine.takes(spec)]
            assert bool(sparse) == (ways[-1] != "dense")
            for spec in SPECS:
                grad = gradient(transport.rank, step, spec)
                if spec in sparse:
                    engine.submit(spec, grad)
                    continue
                leftover = engine.residuals.release(spec.name, grad)
                engine.residuals.flushed(spec.name)
                whole = grad if leftover is None else grad + leftover
                applied[spec.name] += transport.allreduce_sum(whole, channel="dense")
            engine.scale = 1.0
            for spec in sparse:
                applied[spec.name] += engine.result(spec.name)
            engine.settle()
        assert ways[::2] == ["dense", "gather 0.01", "oktopk 0.01", "dense"]
        left = engine.state_dict()["residual"]
        engine.disconnect()
        return applied, left

    done = run_ranks(2, worker)
    for applied, _ in done:
        for spec in SPECS:
            total = sum(gradient(r, s, spec) for r in range(2) for s in range(8))
            kept = sum(left[spec.name] for _, left in done if spec.name in left)
            torch.testing.assert_close(applied[spec.name] + kept, total, rtol=0, atol=1e-3)


def test_a_profile_file_is_json(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    SLOW_NETWORK.save(path)
    data = json.loads(path.read_text())
    assert data["place"] == asdict(HERE)
    assert Profile.from_json(data) == SLOW_NETWORK
