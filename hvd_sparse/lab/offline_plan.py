"""Plans without a training: costs of hosts that are not there, reasons in words, and policies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hvd_sparse.collectives.two_levels import Levels, Prediction, flat, two_levels
from hvd_sparse.cost_model import Cost, Work
from hvd_sparse.engine import Method, TensorSpec
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.errors import ConfigError
from hvd_sparse.planner.choose import MARGIN, ChosenPlan, Placement, TimedTensor, jobs_of, schedule
from hvd_sparse.planner.costs import REFERENCE_NUMEL, Line, MethodCosts, Place, Profile, place_of
from hvd_sparse.planner.measure import LIMIT_S, NUMELS, measure_method
from hvd_sparse.policy.assignment import PolicyAssignment, Rule
from hvd_sparse.policy.load import Policy, collectives_of, taken_by
from hvd_sparse.tables import shown_s
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, WIRES


def candidates_of(rules: Sequence[Rule]) -> dict[MethodId, Method]:
    """All methods that a planner may choose from."""
    return {m.id: m for rule in rules if rule.is_auto for m in rule.methods}


def measure_encoding(
    transport: Transport, methods: Mapping[MethodId, Method]
) -> dict[MethodId, MethodCosts]:
    """Costs of methods alone, without a dense allreduce to compare them with.

    One rank sends nothing: its wire is that of the options, and the plain one where that is "auto".
    """
    found = {}
    for name, method in methods.items():
        costs = measure_method(transport, method, NUMELS, LIMIT_S / len(methods))
        wire = WIRES.get(str(dict(method.id.options).get("wire")), PLAIN)
        sent = wire.expected_bytes(REFERENCE_NUMEL, method.k(REFERENCE_NUMEL))
        found[name] = replace(costs, wire=sent)
    return found


@dataclass(frozen=True)
class Verdict:
    """DRAGONN's equation (1) for one tensor: compress it where encode + decode < dense - sparse."""

    dense_s: float
    encode_s: float
    decode_s: float
    exchange_s: float

    @property
    def encode_decode_s(self) -> float:
        """The left side of the equation."""
        return self.encode_s + self.decode_s

    @property
    def sparse_s(self) -> float:
        """All of its sparse reduction."""
        return self.encode_decode_s + self.exchange_s

    @property
    def holds(self) -> bool:
        """Encode + decode < dense - sparse."""
        return self.encode_decode_s < self.dense_s - self.exchange_s


def verdict(
    profile: Profile, costs: MethodCosts, numel: int, bucket_numel: int | None = None
) -> Verdict:
    """Equation (1) of Wang et al., "DRAGONN" (ICML '22), with this profile's costs.

    A tensor that shares a bucket of `bucket_numel` elements has its share of the fixed costs, and
    what it saves is its own part of Horovod's fused reduction.
    """
    if bucket_numel is None:
        encode_s, decode_s = costs.encode.at(numel), costs.decode.at(numel)
        return Verdict(profile.dense.at(numel), encode_s, decode_s, costs.exchange.at(numel))
    share = numel / bucket_numel
    encode_s, decode_s, exchange_s = (
        share * line.at(bucket_numel) for line in (costs.encode, costs.decode, costs.exchange)
    )
    return Verdict(profile.dense.per_element_s * numel, encode_s, decode_s, exchange_s)


def profiles_of_hosts(levels: Levels, costs: Mapping[MethodId, MethodCosts]) -> list[Profile]:
    """A profile of the flat form, and one of two levels where there are two levels."""
    place = place_of("modelled", levels.world_size, levels.hosts)
    forms = (False, True) if min(levels.hosts, levels.local_size) > 1 else (False,)
    return [modelled_on_hosts(place, levels, costs, hierarchical=form) for form in forms]


def modelled_on_hosts(
    place: Place, levels: Levels, methods: Mapping[MethodId, MethodCosts], *, hierarchical: bool
) -> Profile:
    """A profile of hosts with several ranks and one network card each, by the cost model.

    Of `methods`, the measured costs of encoding and decoding count, not those of exchanges. If it
    is `hierarchical`, a rank encodes a shard only.
    """
    form = two_levels if hierarchical else flat
    shards = levels.local_size if hierarchical else 1

    def costs_of(costs: MethodCosts) -> MethodCosts:
        def predicted(numel: int) -> Prediction:
            k = max(1, round(costs.density * numel))
            return form(costs.collective, levels, numel, k, costs.wire)

        return replace(costs, encode=costs.encode.times(1, 1 / shards), exchange=_line(predicted))

    with_exchange = {name: costs_of(costs) for name, costs in methods.items()}
    words = f"cost model: {levels.hosts} hosts x {levels.local_size} ranks, "
    words += "two levels" if hierarchical else "flat"
    return Profile(place, _line(lambda numel: dense_ring(levels, numel)), with_exchange, words)


def _line(predicted: Callable[[int], Prediction]) -> Line:
    """The line through two sizes: at one density, a prediction is linear."""
    one, two = (predicted(factor * REFERENCE_NUMEL).seconds for factor in (1, 2))
    slope = (two - one) / REFERENCE_NUMEL
    return Line(max(0.0, one - slope * REFERENCE_NUMEL), slope)


def dense_ring(levels: Levels, numel: int) -> Prediction:
    """Horovod's dense allreduce: a ring over all ranks, of which one edge enters each host.

    That one has the card to itself. Each of 2 (P-1) steps has n/P values.
    """
    P, has_cards = levels.world_size, levels.hosts > 1
    received = Cost(2 * (P - 1), dense_words=2 * numel * (P - 1) / P)
    card = replace(
        levels.between, beta_s_per_byte=levels.between.beta_s_per_byte / levels.local_size
    )
    slowest = card if has_cards else levels.inside
    on_the_way_s = received.latency_s(slowest) + received.nbytes() * slowest.beta_s_per_byte
    work = Work(added_values=numel * (P - 1) / P)
    seconds = on_the_way_s + levels.between.computing.seconds(work)
    return Prediction(seconds, *((0.0, received.nbytes()) if has_cards else (on_the_way_s, 0.0)))


def as_they_come(
    specs: list[TensorSpec], rules: PolicyAssignment, backward_s: float
) -> list[TimedTensor]:
    """The tensors in the order of their gradients, which become ready during backward.

    A gradient becomes ready after a time that is proportional to the elements before it.
    """
    done = list(accumulate(spec.numel for spec in specs))
    first, total = done[0], max(1, done[-1] - done[0])
    return [
        TimedTensor(spec, backward_s * (d - first) / total, rules.candidates_of(spec))
        for spec, d in zip(specs, done, strict=True)
    ]


HEADINGS = ("tensor", "elements", "ready", "dense", "sparse", "encode", "decode")
"""The headings of the columns of figures; the choice and the reason follow."""
LONGEST_NAME = 30


def row_of(
    tensor: TimedTensor,
    rules: PolicyAssignment,
    profile: Profile,
    plan: ChosenPlan,
    tensors: Sequence[TimedTensor],
) -> dict[str, Any]:
    """One tensor of a plan: the four terms of DRAGONN's equation (1), the choice, and why.

    A tensor in a bucket bears its share of the bucket's fixed costs. The terms of a dense tensor
    are those of the cheapest candidate, as if the tensor had a bucket of its own.
    """
    spec, placement = tensor.spec, plan.placements.get(tensor.spec.name)
    row: dict[str, Any] = {"name": spec.name, "numel": spec.numel, "ready_s": tensor.ready_s}
    row |= {"dense_s": profile.dense.at(spec.numel), "sparse_s": None}
    row |= {"encode_s": None, "decode_s": None}
    if not tensor.candidates:
        method = rules.choice_of(spec).method
        row["choice"] = "dense" if method is None else method.description
        row["shown"] = "dense" if method is None else method.id.short
        row["reason"] = "the policy says so"
        return row
    if placement is not None:
        numels = {t.spec.name: t.spec.numel for t in tensors}
        whole = sum(numels[name] for name, p in plan.placements.items() if p == placement)
        found = verdict(profile, profile.costs_of(placement.method), spec.numel, whole)
        bucket = placement.bucket.removeprefix("planned ")
        row["choice"] = f"{placement.method}, bucket {bucket}"
        row["shown"] = f"{placement.method.short}, {bucket}"
    else:
        every = [profile.costs_of(method.id) for method in tensor.candidates]
        found = min(
            (verdict(profile, costs, spec.numel) for costs in every), key=lambda v: v.sparse_s
        )
        row["choice"] = row["shown"] = "dense"
    row |= {"dense_s": found.dense_s, "sparse_s": found.exchange_s}
    row |= {"encode_s": found.encode_s, "decode_s": found.decode_s}
    hidden = placement is None and is_hidden(tensor, profile, plan, tensors)
    row["reason"] = reason(found, plan, placement is not None, hidden)
    return row


def is_hidden(
    tensor: TimedTensor, profile: Profile, plan: ChosenPlan, tensors: Sequence[TimedTensor]
) -> bool:
    """Whether a dense tensor is reduced before the last gradient is ready."""
    end_s = max(each.ready_s for each in tensors)
    spans = schedule(jobs_of(profile, tensors, plan.placements))
    return any(span.job.label == tensor.spec.name and span.stop_s <= end_s for span in spans)


def reason(found: Verdict, plan: ChosenPlan, is_sparse: bool, hidden: bool) -> str:
    """DRAGONN's equation (1) in words."""
    left, right = shown_s(found.encode_decode_s), found.dense_s - found.exchange_s
    if not found.holds:
        words = f"encode + decode {left} > dense - sparse {shown_s(right)}"
        if right <= 0:
            words = f"the exchange alone takes {shown_s(found.exchange_s)}"
        return f"{words}; but it shares its bucket" if is_sparse else words
    if is_sparse:
        return f"encode + decode {left} < dense - sparse {shown_s(right)}"
    if hidden:
        return "backward hides the dense reduction"
    if not plan.placements:
        return f"the whole model would gain less than {100 * (1 - MARGIN):.0f} %"
    return "it costs less dense, together with other tensors"


def figures_of(row: dict[str, Any]) -> tuple[str, ...]:
    """The columns of figures of a row, as text."""
    times = (row[f"{heading}_s"] for heading in HEADINGS[2:])
    name: str = row["name"]
    return (
        name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}",
        f"{row['numel']:,}",
        *("" if seconds is None else shown_s(seconds) for seconds in times),
    )


DROPPED = ("profile", "plan_cache")
"""Keys of a policy that only a planner reads."""
OF_RULE = ("match", "compress", "bucket")
"""Keys of a rule that do not describe its methods."""


def pinned(
    policy: Policy,
    rules: PolicyAssignment,
    specs: Sequence[TensorSpec],
    placements: Mapping[str, Placement],
) -> dict[str, Any]:
    """A policy with a plan in the place of its rules with `compress: auto`, as plain data.

    `rules` is the policy's assignment for the model of these tensors, and the plan has the
    `placements` of those that it compresses, by name.

    Raises:
        ConfigError: The plan uses a method that the tensor's rule does not have.
    """
    data = policy.document.data
    buckets: dict[tuple[int, MethodId, str], list[str]] = {}
    left = set()
    for spec in specs:
        rule, placed = rules.rule_of(spec), placements.get(spec.name)
        if rule is not None and placed is not None:
            buckets.setdefault((rule.place, placed.method, placed.bucket), []).append(spec.name)
        elif rule is not None:
            left.add(rule.place)
    used = {place for place, _, _ in buckets}
    made: list[dict[str, Any]] = []
    for (place, method, bucket), names in buckets.items():
        one_of = "|".join(map(re.escape, names))
        settings = _settings(policy, rules, place, method)
        made.append({"match": {"name_regex": one_of}, "bucket": bucket, **settings})
    for place, written in enumerate(data["rules"]):
        is_open = written.get("compress") == "auto"
        if is_open and place in used - left:
            continue
        kept_keys = {key: value for key, value in written.items() if key == "match" or not is_open}
        made.append({**kept_keys, "compress": "never"} if is_open else kept_keys)
    kept = {key: value for key, value in data.items() if key not in (*DROPPED, "rules")}
    taken = taken_by(rule for rule in rules.rules if not rule.is_auto or rule.place in used)
    if "defaults" in kept:
        kept["defaults"] = {key: v for key, v in kept["defaults"].items() if key in taken}
    return {**kept, "rules": made}


def _settings(
    policy: Policy, rules: PolicyAssignment, place: int, method: MethodId
) -> dict[str, Any]:
    """The keys of a rule that describe one of its methods, with this method's collective."""
    rule = policy.document.data["rules"][place]
    settings = {key: value for key, value in rule.items() if key not in OF_RULE}
    methods = [each.id for each in rules.rules[place].methods]
    if method not in methods:
        raise ConfigError(f"rules[{place}] has no method {str(method)!r}")
    if len(methods) > 1:
        whole = {**policy.document.data.get("defaults", {}), **settings}
        settings["collective"] = collectives_of(whole)[methods.index(method)]
    return settings
