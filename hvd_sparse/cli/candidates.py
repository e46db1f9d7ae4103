"""Which methods a planner is to choose from, by arguments that several subcommands share."""

from __future__ import annotations

import argparse
from typing import Any

from hvd_sparse.engine import Method
from hvd_sparse.methods import METHODS
from hvd_sparse.policy.assignment import PolicyAssignment, Rule
from hvd_sparse.policy.load import Policy, load_policy


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


def candidates_of(rules: PolicyAssignment | tuple[Rule, ...]) -> dict[str, Method]:
    """All methods that a planner may choose, by description."""
    every = rules.rules if isinstance(rules, PolicyAssignment) else rules
    return {m.description: m for rule in every if rule.planned for m in rule.methods}


def short(description: str) -> str:
    """A method's name, collective and density, for a table; JSON has all of it."""
    name, *settings = description.split()
    shown = [text for text in settings if text.startswith(("collective=", "density="))]
    return " ".join([name, *shown])
