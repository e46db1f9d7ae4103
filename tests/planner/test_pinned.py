"""A plan pinned as a policy, and drawn as a timeline."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from hvd_sparse.engine import TensorSpec
from hvd_sparse.engine.bucketing import BucketPlan, MethodId, form_buckets
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.offline_plan import pinned
from hvd_sparse.lab.plots import timeline
from hvd_sparse.planner.choose import Placement, TimedTensor, choose_plan
from hvd_sparse.planner.costs import Line, MethodCosts, Place, Profile
from hvd_sparse.planner.planner import FixedAssignment
from hvd_sparse.policy.assignment import PolicyAssignment
from hvd_sparse.policy.load import load_policy

POLICY = """
version: 1
timeout_s: 60.0
plan_cache: none
defaults: {density: 0.02, momentum: 0.5}
rules:
  - {match: {name: "norm*"}, compress: never}
  - {match: {name: "always*"}, compressor: oktopk, density: 0.1}
  - {match: {ndim: 2}, compress: auto, compressor: topk, wire: float16}
  - {compress: auto, compressor: topk, collective: "gtopk,oktopk", density: 0.01}
"""
SHAPES = {"norm.0": (10,), "always": (10, 10), "a.weight": (50, 60), "b.weight": (70, 80)}
SHAPES |= {"table[0]|x": (90, 9), "a.bias": (60,), "b.bias": (80,), "c.bias": (90,)}
SPECS = [TensorSpec(name, shape, "torch.float32") for name, shape in SHAPES.items()]


def buckets_of(specs: list[TensorSpec], assignment: object) -> list[BucketPlan]:
    sparse = [s for s in specs if assignment.choice_of(s).method]  # type: ignore[attr-defined]
    return form_buckets(sparse, assignment)  # type: ignore[arg-type]


def test_a_pinned_plan_loads_again_as_the_same(tmp_path: Path) -> None:
    """The same tensors by the same methods in the same buckets, and nothing left to a planner."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    policy = load_policy(tmp_path / "policy.yaml")
    rules = PolicyAssignment(policy.rules, {})
    two, one = (rules.rules[place].methods for place in (2, 3))
    placements = {
        "a.weight": Placement(two[1].id, "planned 0.0"),
        "b.weight": Placement(two[1].id, "planned 0.1"),
        "table[0]|x": Placement(two[3].id, "planned 0.1"),
        "a.bias": Placement(one[1].id, "planned 1.0"),
        "c.bias": Placement(one[1].id, "planned 1.0"),
    }
    planned = FixedAssignment(rules, placements, None)
    path = tmp_path / "pinned.yaml"
    path.write_text(yaml.safe_dump(pinned(policy, rules, SPECS, placements), sort_keys=False))
    loaded = load_policy(path)
    assert not any(rule.is_auto for rule in loaded.rules)
    assert loaded.timeout_s == 60.0
    again = PolicyAssignment(loaded.rules, {})

    def told(plans: list[BucketPlan]) -> list[tuple[str, list[str]]]:
        return [(p.method.description, [spec.name for spec in p.specs]) for p in plans]

    assert told(buckets_of(SPECS, again)) == told(buckets_of(SPECS, planned))
    assert len(buckets_of(SPECS, again)) == 5
    assert again.choice_of(SPECS[6]).method is None  # b.bias, which the planner left dense


def test_what_decides_nothing_any_more_is_left_out() -> None:
    """A rule whose tensors are all placed, and a default key that only a dense rule took."""
    defaults = {"density": 0.1, "threshold_interval": 5}
    all_left = {"match": {"ndim": 1}, "compress": "auto", "compressor": "oktopk"}
    all_placed = {"match": {"ndim": 2}, "compress": "auto", "compressor": "topk"}
    policy = load_policy({"version": 1, "defaults": defaults, "rules": [all_left, all_placed]})
    rules = PolicyAssignment(policy.rules, {})
    place = Placement(policy.rules[1].methods[0].id, "planned 0")
    placements = {spec.name: place for spec in SPECS if len(spec.shape) == 2}
    data = pinned(policy, rules, SPECS, placements)
    assert data["rules"][1:] == [{"match": {"ndim": 1}, "compress": "never"}]
    assert data["defaults"] == {"density": 0.1}
    again = PolicyAssignment(load_policy(data).rules, {})
    assert again.idle_rules(SPECS) == []


def test_a_method_that_no_rule_has_is_named() -> None:
    policy = load_policy({"version": 1, "rules": [{"compress": "auto", "compressor": "topk"}]})
    rules = PolicyAssignment(policy.rules, {})
    with pytest.raises(ConfigError, match=r"rules\[0\] has no method 'magic'"):
        pinned(policy, rules, SPECS, {"a.bias": Placement(MethodId("magic"), "0")})


def test_a_timeline_has_all_that_the_prediction_counts() -> None:
    line, place = Line(1e-3, 1e-9), Place("here", 2, "local", "2")
    (method,) = (
        load_policy({"version": 1, "rules": [{"compress": "auto", "compressor": "oktopk"}]})
        .rules[0]
        .methods
    )
    costs = {method.id: MethodCosts("oktopk", 0.01, line, line, line)}
    profile = Profile(place, Line(1e-3, 2e-8), costs)
    tensors = [
        TimedTensor(TensorSpec(name, (1_000_000,), "torch.float32"), at_s, (method,))
        for name, at_s in (("first", 0.0), ("last", 0.05))
    ]
    plan = choose_plan(profile, tensors)
    assert set(plan.placements) == {"last"}
    lanes = timeline(profile, tensors, plan.placements)
    took: dict[str, float] = defaultdict(float)
    for spans in lanes.values():
        for kind, start_s, stop_s in spans:
            took[kind] += stop_s - start_s
    assert took["backward"] == pytest.approx(0.05)
    assert took["dense"] == pytest.approx(0.021)
    assert took["encode"] == took["decode"] == pytest.approx(2e-3)
    assert took["waiting"] == pytest.approx(plan.predicted_s - 0.05)
    dense = timeline(profile, tensors, {})
    assert max(stop_s for *_, stop_s in dense["dense"]) == pytest.approx(plan.dense_s)
