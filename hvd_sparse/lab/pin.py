"""Writes a plan as a policy: the same tensors, methods and buckets, without a planner."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_sparse.engine import TensorSpec
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.errors import ConfigError
from hvd_sparse.planner.choose import Placement
from hvd_sparse.policy.assignment import PolicyAssignment
from hvd_sparse.policy.load import Policy, collectives_of, taken_by

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
