"""Options that describe hosts with several ranks each, for `hvd-sparse plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_sparse.checks import check_count
from hvd_sparse.collectives.registry import COSTED
from hvd_sparse.collectives.two_levels import (
    Levels,
    Prediction,
    dense_ring,
    flat,
    shared,
    two_levels,
)
from hvd_sparse.cost_model import Link
from hvd_sparse.engine import Method
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.predicted import Verdict, schedule, verdict
from hvd_sparse.methods import METHODS
from hvd_sparse.planner.choose import (
    MARGIN,
    ChosenPlan,
    TimedTensor,
    jobs_of,
)
from hvd_sparse.planner.costs import REFERENCE_NUMEL, Line, MethodCosts, Place, Profile, place_of
from hvd_sparse.policy.assignment import PolicyAssignment, Rule
from hvd_sparse.policy.load import Policy, load_policy
from hvd_sparse.tables import bytes_per_s, seconds, shown_s

# MERGED cli.candidates
# Which methods a planner is to choose from, by arguments that several subcommands share.


def add_candidate_arguments(parser: argparse.ArgumentParser) -> None:
    """A policy, or a compressor and its density for all tensors."""
    parser.add_argument("--policy", metavar="FILE", help="a policy file with compress: auto")
    parser.add_argument(
        "--compressor",
        default="topk",
        choices=sorted(METHODS),
        help="without a policy: the constructor (default: %(default)s)",
    )
    parser.add_argument(
        "--density", type=float, default=0.01, help="its density (default: %(default)s)"
    )


def policy_of(options: argparse.Namespace) -> Policy:
    """The policy that the arguments ask for."""
    source: Any = options.policy
    if source is None:
        rule = {"compress": "auto", "compressor": options.compressor, "density": options.density}
        source = {"version": 1, "rules": [rule]}
    return load_policy(source)


def candidates_of(rules: PolicyAssignment | tuple[Rule, ...]) -> dict[MethodId, Method]:
    """All methods that a planner may choose from."""
    every = rules.rules if isinstance(rules, PolicyAssignment) else rules
    return {m.id: m for rule in every if rule.is_auto for m in rule.methods}


# MERGED cli.explained
# What is said of a tensor of a plan: the terms of DRAGONN's equation (1), the choice, and why.

HEADINGS = ("tensor", "elements", "ready", "dense", "sparse", "encode", "decode")
"""Of the columns of figures; the choice and the reason follow."""


def row_of(
    tensor: TimedTensor,
    rules: PolicyAssignment,
    profile: Profile,
    plan: ChosenPlan,
    tensors: Sequence[TimedTensor],
) -> dict[str, Any]:
    """One tensor: the four terms, what was chosen, and why.

    A tensor in a bucket has its share of the bucket's fixed costs. For one that is dense, the terms
    are those of the cheapest candidate, as if the tensor were alone.
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
    tensor: TimedTensor,
    profile: Profile,
    plan: ChosenPlan,
    tensors: Sequence[TimedTensor],
) -> bool:
    """Whether a dense tensor is reduced before the last gradient comes."""
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
        return "backward hides it as it is"
    if not plan.placements:
        return f"the whole model would gain less than {100 * (1 - MARGIN):.0f} %"
    return "dense together with others costs less"


def figures_of(row: dict[str, Any]) -> tuple[str, ...]:
    """A row's columns of figures, as text."""
    times = (row[f"{name}_s"] for name in HEADINGS[2:])
    return (
        row["name"],
        f"{row['numel']:,}",
        *("" if seconds is None else shown_s(seconds) for seconds in times),
    )


# MERGED planner.levels
# Profiles of hosts with several ranks and one network card, by the cost model.


def modelled_on_hosts(
    place: Place, levels: Levels, methods: Mapping[MethodId, MethodCosts], *, hierarchical: bool
) -> Profile:
    """A profile of hosts that are not there.

    Args:
        place: The world.
        levels: The hosts, and the links between and inside them.
        methods: Measured costs of encoding and decoding; their exchanges are not read.
        hierarchical: In two levels, where a rank encodes a shard; else flat.

    Raises:
        ConfigError: A method's collective has no formula.
    """
    form = two_levels if hierarchical else flat
    shards = levels.local_size if hierarchical else 1

    def costs_of(costs: MethodCosts) -> MethodCosts:
        if costs.collective not in COSTED:
            raise ConfigError(f"the cost model has no formula for {costs.collective!r}")

        def predicted(numel: int) -> Prediction:
            k = max(1, round(costs.density * numel))
            return form(costs.collective, levels, numel, k, costs.wire)

        return replace(costs, encode=costs.encode.times(1, 1 / shards), exchange=_line(predicted))

    with_exchange = {name: costs_of(costs) for name, costs in methods.items()}
    words = f"cost model: {levels.hosts} hosts x {levels.local_size} ranks, "
    words += "two levels" if hierarchical else "flat"
    return Profile(place, _line(lambda numel: dense_ring(levels, numel)), with_exchange, words)


def _line(predicted: Callable[[int], Prediction]) -> Line:
    """The line through two sizes: at one density, a prediction is one."""
    one, two = (predicted(factor * REFERENCE_NUMEL).seconds for factor in (1, 2))
    slope = (two - one) / REFERENCE_NUMEL
    return Line(max(0.0, one - slope * REFERENCE_NUMEL), slope)


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """How many hosts there are, and what is inside them."""
    add = parser.add_argument_group("hosts of several ranks, in the place of --ranks").add_argument
    add("--hosts", type=int, help="H; --bandwidth is that of a host's card")
    add("--local", type=int, default=1, help="ranks of a host (default: %(default)s)")
    add(
        "--local-bandwidth",
        type=bytes_per_s,
        default="10gbyte",
        help="between two ranks of a host (default: %(default)s)",
    )
    add("--local-latency", type=seconds, default="10us", help="there (default: %(default)s)")


def levels_of(options: argparse.Namespace) -> Levels:
    """What the options describe.

    Raises:
        ConfigError: One is out of its range.
    """
    hosts = check_count("--hosts", options.hosts, 1)
    local_size = check_count("--local", options.local, 1)
    card = Link(options.latency, 1 / options.bandwidth)
    inside = Link(options.local_latency, 1 / options.local_bandwidth)
    return Levels(hosts, local_size, shared(card, local_size), inside)


def profiles_of_hosts(levels: Levels, costs: Mapping[MethodId, MethodCosts]) -> list[Profile]:
    """Costs of the flat form, and of two levels where there are two."""
    place = place_of("modelled", levels.world_size, levels.hosts)
    forms = (False, True) if min(levels.hosts, levels.local_size) > 1 else (False,)
    return [modelled_on_hosts(place, levels, costs, hierarchical=form) for form in forms]
