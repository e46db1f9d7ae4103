"""`hvd-sparse plan`: what the planner would choose for a model, in any world."""

from __future__ import annotations

import argparse
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hvd_sparse._version import __version__
from hvd_sparse.adapter.binding import SPARSE_DTYPES, spec_of
from hvd_sparse.adapter.session import RunOptions
from hvd_sparse.checks import check_count
from hvd_sparse.cli.command import (
    Command,
    Output,
    add_candidate_arguments,
    bytes_per_s,
    load_model,
    policy_of,
    seconds,
)
from hvd_sparse.collectives.two_levels import Levels, shared
from hvd_sparse.cost_model import Link
from hvd_sparse.errors import ConfigError, say
from hvd_sparse.files import write_text
from hvd_sparse.lab.offline_plan import (
    HEADINGS,
    as_they_come,
    candidates_of,
    figures_of,
    measure_encoding,
    pinned,
    profiles_of_hosts,
    row_of,
)
from hvd_sparse.lab.plots import load_pyplot, plot_timelines
from hvd_sparse.planner.choose import ChosenPlan, TimedTensor, choose_plan
from hvd_sparse.planner.costs import Profile, processor
from hvd_sparse.policy.assignment import PolicyAssignment
from hvd_sparse.policy.load import Policy, owning_modules, sparse_embeddings
from hvd_sparse.tables import shown_s, table
from hvd_sparse.transports import LocalWorld


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODULE:FACTORY", help="a function that makes the model")
    add("--ranks", type=int, help="P (default: 4)")
    add(
        "--bandwidth", type=bytes_per_s, default="1gbit", help="of each link (default: %(default)s)"
    )
    add("--latency", type=seconds, default="100us", help="of each message (default: %(default)s)")
    add("--profile", type=Path, help="measured costs, in place of bandwidth and latency")
    add(
        "--backward",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="duration of backward, which hides reductions (default: hides nothing)",
    )
    add_candidate_arguments(parser)
    add("--plot", type=Path, metavar="FILE", help="draw the step as a timeline")
    add("--write-policy", type=Path, metavar="FILE", help="write the plan as a policy without auto")
    add = parser.add_argument_group("hosts with several ranks, instead of --ranks").add_argument
    add("--hosts", type=int, help="H; --bandwidth is that of a host's card")
    add("--local", type=int, default=1, help="ranks per host (default: %(default)s)")
    add(
        "--local-bandwidth",
        type=bytes_per_s,
        default="10gbyte",
        help="between two ranks of a host (default: %(default)s)",
    )
    add(
        "--local-latency",
        type=seconds,
        default="10us",
        help="of a message in a host (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> Output:
    if options.hosts is None and options.local != 1:
        raise ConfigError(f"--local must be 1 without --hosts, got {options.local}")
    if options.ranks is None:
        options.ranks = 4 if options.hosts is None else levels_of(options).world_size
    elif options.hosts is not None and options.ranks != (ranks := levels_of(options).world_size):
        raise ConfigError(f"--ranks must be {ranks}, --hosts times --local, got {options.ranks}")
    check_count("--ranks", options.ranks, 2)
    if options.plot is not None:
        load_pyplot(options.plot)  # fails now, not after all the work
    model = load_model(options.model)
    policy = policy_of(options)
    rules = PolicyAssignment(policy.rules, owning_modules(model, model.named_parameters()))
    profiles = profiles_of(options, rules)
    apart = sparse_embeddings(model)
    specs = [
        spec_of(name, p)
        for name, p in reversed(list(model.named_parameters()))
        if p.requires_grad and p.dtype in SPARSE_DTYPES and id(p) not in apart
    ]
    if not specs:
        raise ConfigError(
            f"model {options.model!r} has no parameter that is trained and can be compressed"
        )
    all_tensors = as_they_come(specs, rules, options.backward)
    tensors = [each for each in all_tensors if rules.choice_of(each.spec).method is None]
    if not tensors:
        raise ConfigError(f"{options.policy}: no tensor is left to compress: auto, nothing to plan")
    plans = [choose_plan(each, tensors) for each in profiles]
    plan, profile = min(zip(plans, profiles, strict=True), key=lambda pair: pair[0].predicted_s)
    rows = [row_of(tensor, rules, profile, plan, tensors) for tensor in reversed(all_tensors)]
    for row in rows:
        if options.policy is None and row["numel"] < RunOptions.dense_below:
            row["reason"] = f"under {RunOptions.dense_below} elements (dense_below)"
    report = {
        "costs": profile.source,
        "ranks": options.ranks,
        "dense_s": plan.dense_s,
        "predicted_s": plan.predicted_s,
        "forms": {p.source: each.predicted_s for p, each in zip(profiles, plans, strict=True)},
        "buckets": len(set(plan.placements.values())),
        "tensors": rows,
        "always_sparse": len(all_tensors) - len(tensors),
        "rests_on": costs_from(options, profile),
    }
    written = write_outputs(
        *(options, policy, rules, profile, tensors, plan), in_two_levels=profile is not profiles[0]
    )
    return Output(report, text_of(report, options.backward) + written)


def profiles_of(options: argparse.Namespace, rules: PolicyAssignment) -> list[Profile]:
    """Costs of each form: from a profile, or modelled with the encoding measured here."""
    if options.profile is not None:
        if options.hosts is not None:
            raise ConfigError("--hosts takes no --profile: it was measured without them")
        measured = Profile.load(options.profile)
        return [measured.carried_over(replace(measured.place, world_size=options.ranks))]
    methods = candidates_of(rules.rules)
    if not methods:
        raise ConfigError(f"{options.policy}: no rule with compress: auto, nothing to plan")
    say(f"measuring how {len(methods)} methods encode and decode here …")
    costs = measure_encoding(LocalWorld(1).transport(0), methods)
    return profiles_of_hosts(levels_of(options), costs)


def levels_of(options: argparse.Namespace) -> Levels:
    """The hosts that the options describe; without `--hosts` each rank is one.

    Raises:
        ConfigError: An option is out of its range.
    """
    hosts = options.ranks if options.hosts is None else check_count("--hosts", options.hosts, 1)
    local_size = check_count("--local", options.local, 1)
    card = Link(options.latency, 1 / options.bandwidth)
    inside = Link(options.local_latency, 1 / options.local_bandwidth)
    return Levels(hosts, local_size, shared(card, local_size), inside)


def costs_from(options: argparse.Namespace, profile: Profile) -> str:
    """What the costs were measured on, in words."""
    if options.profile is None:
        return f"encoding and decoding as measured on this CPU ({processor()})"
    place = profile.place
    return f"all costs from {options.profile}, taken on {place.host_class} ({place.device})"


def write_outputs(
    options: argparse.Namespace,
    policy: Policy,
    rules: PolicyAssignment,
    profile: Profile,
    tensors: list[TimedTensor],
    plan: ChosenPlan,
    *,
    in_two_levels: bool,
) -> str:
    """Draw and pin the plan as the options ask; returns the names of the files, in words."""
    words = ""
    if options.plot is not None:
        plot_timelines(profile, tensors, plan.placements, options.plot)
        words += f"\ntimeline: {options.plot}"
    if options.write_policy is not None:
        specs = [tensor.spec for tensor in reversed(tensors)]
        data = pinned(policy, rules, specs, plan.placements)
        if in_two_levels:
            data["hierarchical"] = "auto"
        title = f"# A plan of hvd-sparse {__version__}: {profile.source}; "
        title += f"{costs_from(options, profile)}.\n"
        write_text(options.write_policy, title + yaml.safe_dump(data, sort_keys=False))
        words += f"\npolicy: {options.write_policy}"
    return words


def text_of(report: dict[str, Any], backward_s: float) -> str:
    """The plan as text, 100 columns wide: a row per tensor, and the time of all reductions."""
    places = {"dense": "dense"}  # of tensors, by how they are reduced
    reasons: dict[str, str] = {}
    rows: list[tuple[str, ...]] = [(*HEADINGS, "in", "why")]
    for row in report["tensors"]:
        place = places.setdefault(row["shown"], row["shown"].rpartition(", ")[2])
        reason = re.sub(r" [\d.e+-]+ [mun]?s\b", "", row["reason"])  # the row has the figures
        mark = reasons.setdefault(reason, string.ascii_letters[len(reasons) % 52])
        rows.append((*figures_of(row), place, mark))
    notes = [f"{place}: {shown.rpartition(', ')[0]}" for shown, place in places.items()][1:]
    notes += [f"{mark}: {reason}" for reason, mark in reasons.items()]
    hidden = (
        f"in {shown_s(backward_s)} hides a part" if backward_s else "hides nothing (--backward)"
    )
    others_than = " but of what is always compressed" if report["always_sparse"] else ""
    gain = report["dense_s"] / report["predicted_s"]
    others = [
        f"\n{source}: {shown_s(seconds)}"
        for source, seconds in report["forms"].items()
        if source != report["costs"]
    ]
    return (
        f"{report['ranks']} ranks; costs: {report['costs']};\n{report['rests_on']}\n\n"
        f"{table(rows)}\n\n" + "\n".join(notes) + "\n\n"
        f"all reductions{others_than}: {shown_s(report['predicted_s'])} as planned, "
        f"{shown_s(report['dense_s'])} dense ({gain:.2f} ×)"
        + "".join(others)
        + f"\nassumed: these costs, and a network without other traffic; backward {hidden}"
    )


PLAN = Command(
    name="plan",
    summary="show what the planner would compress in a model, and why",
    examples=(
        "hvd-sparse plan torchvision.models:vgg16 --ranks 64 --bandwidth 25gbit --latency 30us",
        "hvd-sparse plan torchvision.models:vgg16 --hosts 32 --local 8 --bandwidth 25gbit "
        "--local-bandwidth 300gbyte",
        "hvd-sparse plan models:make --policy policy.yaml --profile profile.json --backward 80ms",
        "hvd-sparse plan models:make --backward 80ms --plot step.png --write-policy planned.yaml",
    ),
    add_arguments=add_arguments,
    run=run,
)
