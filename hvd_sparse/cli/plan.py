"""`hvd-sparse plan`: what the planner would do with a model, in any world."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from hvd_sparse._version import __version__
from hvd_sparse.adapter.binding import SPARSE_DTYPES, spec_of
from hvd_sparse.checks import check_count
from hvd_sparse.cli.command import Command, Output, load_model
from hvd_sparse.cost_model import Link
from hvd_sparse.engine import TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.files import write_text
from hvd_sparse.lab.offline_plan import (
    HEADINGS,
    add_candidate_arguments,
    add_host_arguments,
    candidates_of,
    figures_of,
    levels_of,
    policy_of,
    profiles_of_hosts,
    row_of,
)
from hvd_sparse.lab.pin import pinned
from hvd_sparse.lab.plots import load_pyplot, plot_timelines
from hvd_sparse.lab.predicted import modelled
from hvd_sparse.planner.choose import ChosenPlan, TimedTensor, choose_plan
from hvd_sparse.planner.costs import Profile, place_of, processor
from hvd_sparse.planner.measure import measure_encoding
from hvd_sparse.policy.assignment import PolicyAssignment
from hvd_sparse.policy.load import owning_modules
from hvd_sparse.tables import bytes_per_s, seconds, shown_s, table
from hvd_sparse.transports import LocalWorld


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the world, and what may be chosen."""
    parser.add_argument("model", metavar="MODULE:FACTORY", help="a function that makes the model")
    parser.add_argument("--ranks", type=int, default=4, help="P (default: %(default)s)")
    parser.add_argument(
        "--bandwidth", type=bytes_per_s, default="1gbit", help="of a link (default: %(default)s)"
    )
    parser.add_argument(
        "--latency", type=seconds, default="100us", help="of a message (default: %(default)s)"
    )
    parser.add_argument(
        "--profile", type=Path, help="measured costs, in place of bandwidth and latency"
    )
    parser.add_argument(
        "--backward",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="how long backward takes, which hides reductions (default: hides nothing)",
    )
    add_host_arguments(parser)
    add_candidate_arguments(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the step as a timeline")
    parser.add_argument(
        "--write-policy", type=Path, metavar="FILE", help="pin the plan: a policy without auto"
    )


def run(options: argparse.Namespace) -> Output:
    """Plan, and say why."""
    if options.hosts is not None:
        options.ranks = levels_of(options).world_size
    check_count("--ranks", options.ranks, 2)
    if options.plot is not None:
        load_pyplot(options.plot)  # better now than after all the work
    model = load_model(options.model)
    rules = PolicyAssignment(policy_of(options).rules, {})
    owners = owning_modules(model)
    rules.modules = {name: owners[id(p)] for name, p in model.named_parameters()}
    profiles = profiles_of(options, rules)
    specs = [
        spec_of(name, p)
        for name, p in reversed(list(model.named_parameters()))
        if p.requires_grad and p.dtype in SPARSE_DTYPES
    ]
    if not specs:
        raise ConfigError(
            f"model {options.model!r} has no parameter that is trained and can be compressed"
        )
    tensors = as_they_come(specs, rules, options.backward)
    plans = [choose_plan(each, tensors) for each in profiles]
    plan, profile = min(zip(plans, profiles, strict=True), key=lambda pair: pair[0].predicted_s)
    rows = [row_of(tensor, rules, profile, plan, tensors) for tensor in reversed(tensors)]
    report = {
        "costs": profile.source,
        "ranks": options.ranks,
        "dense_s": plan.dense_s,
        "predicted_s": plan.predicted_s,
        "forms": {p.source: each.predicted_s for p, each in zip(profiles, plans, strict=True)},
        "buckets": len(set(plan.placements.values())),
        "tensors": rows,
        "rests_on": costs_from(options, profile),
    }
    written = write_outputs(
        options, rules, profile, tensors, plan, in_two_levels=profile is not profiles[0]
    )
    return Output(report, text_of(report, options.backward) + written)


def profiles_of(options: argparse.Namespace, rules: PolicyAssignment) -> list[Profile]:
    """Costs: measured ones, or modelled ones with the encoding measured here; of each form."""
    if options.profile is not None:
        if options.hosts is not None:
            raise ConfigError("--hosts takes no --profile: it was measured without them")
        measured = Profile.load(options.profile)
        return [measured.carried_over(replace(measured.place, world_size=options.ranks))]
    methods = candidates_of(rules)
    if not methods:
        raise ConfigError(f"{options.policy}: no rule with compress: auto, nothing to plan")
    print(f"measuring how {len(methods)} methods encode and decode here …", file=sys.stderr)
    costs = measure_encoding(LocalWorld(1).transport(0), methods)
    if options.hosts is not None:
        return profiles_of_hosts(levels_of(options), costs)
    link = Link(options.latency, 1 / options.bandwidth)
    return [modelled(place_of("modelled", options.ranks, options.ranks), link, costs)]


def as_they_come(
    specs: list[TensorSpec], rules: PolicyAssignment, backward_s: float
) -> list[TimedTensor]:
    """Gradients that come during backward, each after a time that goes with its elements."""
    done = list(accumulate(spec.numel for spec in specs))
    first, total = done[0], max(1, done[-1] - done[0])
    return [
        TimedTensor(spec, backward_s * (d - first) / total, rules.candidates_of(spec))
        for spec, d in zip(specs, done, strict=True)
    ]


def costs_from(options: argparse.Namespace, profile: Profile) -> str:
    """Whose encoding and decoding it is."""
    if options.profile is None:
        return f"encoding and decoding as measured on this CPU ({processor()})"
    place = profile.place
    return f"all costs from {options.profile}, taken on {place.host_class} ({place.device})"


def write_outputs(
    options: argparse.Namespace,
    rules: PolicyAssignment,
    profile: Profile,
    tensors: list[TimedTensor],
    plan: ChosenPlan,
    *,
    in_two_levels: bool,
) -> str:
    """Draw and pin the plan where that is asked for; what was written, in words."""
    words = ""
    if options.plot is not None:
        plot_timelines(profile, tensors, plan.placements, options.plot)
        words += f"\ntimeline: {options.plot}"
    if options.write_policy is not None:
        specs = [tensor.spec for tensor in reversed(tensors)]
        data = pinned(policy_of(options), rules, specs, plan.placements)
        if in_two_levels:
            data["hierarchical"] = "auto"
        title = f"# A plan of hvd-sparse {__version__}: {profile.source}; "
        title += f"{costs_from(options, profile)}.\n"
        write_text(options.write_policy, title + yaml.safe_dump(data, sort_keys=False))
        words += f"\npolicy: {options.write_policy}"
    return words


def text_of(report: dict[str, Any], backward_s: float) -> str:
    """The table, and the step."""
    rows = [(*HEADINGS, "choice, bucket", "reason")]
    rows += [(*figures_of(row), row["shown"], row["reason"]) for row in report["tensors"]]
    beside = f", beside a backward of {shown_s(backward_s)}" if backward_s else ""
    gain = report["dense_s"] / report["predicted_s"]
    others = [
        f"\n{source}: {shown_s(seconds)}"
        for source, seconds in report["forms"].items()
        if source != report["costs"]
    ]
    return (
        f"{report['ranks']} ranks; costs: {report['costs']}; {report['rests_on']}\n\n"
        f"{table(rows)}\n\n"
        f"all reductions{beside}: {shown_s(report['predicted_s'])} as planned, "
        f"{shown_s(report['dense_s'])} dense ({gain:.2f} ×)" + "".join(others)
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
