"""`hvd-sparse validate`: check a policy file, alone or against a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from hvd_sparse.adapter.binding import SPARSE_DTYPES, spec_of
from hvd_sparse.cli.command import Command, Output, load_model
from hvd_sparse.errors import ConfigError
from hvd_sparse.policy.assignment import PolicyAssignment
from hvd_sparse.policy.load import load_policy, owning_modules, sparse_embeddings, warnings_of
from hvd_sparse.policy.schema import policy_model
from hvd_sparse.tables import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", nargs="?", help="a policy file")
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="show how each of this model's parameters is reduced",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of policies, for editors"
    )


def run(options: argparse.Namespace) -> Output:
    """Check the policy; the status is 1 where a rule applies to nothing."""
    if options.schema:
        schema = json_schema()
        return Output(schema, schema_text(schema))
    if options.policy is None:
        raise ConfigError("a policy file must be given, or --schema")
    policy = load_policy(options.policy)
    model = None if options.model is None else load_model(options.model)
    named = None if model is None else list(model.named_parameters())
    assignment = PolicyAssignment(policy.rules, owning_modules(model, named or ()))
    warned = warnings_of(policy, assignment, named)
    apart = set() if model is None else sparse_embeddings(model)
    tensors = tensors_of(assignment, named or (), apart)
    count = len(policy.rules)
    lines = [f"{options.policy}: valid, {count} rule{'s' * (count != 1)}"]
    if tensors:
        rows = [("parameter", "elements", "rule", "reduced")]
        for tensor in tensors:
            rule = "-" if tensor["rule"] is None else f"rules[{tensor['rule']}]"
            rows.append((tensor["name"], f"{tensor['numel']:,}", rule, tensor["reduced"]))
        lines += ["", table(rows)]
    lines += [f"warning: {warning}" for warning in warned]
    report = {"policy": options.policy, "rules": count, "warnings": warned, "tensors": tensors}
    return Output(report, "\n".join(lines), status=1 if warned else 0)


def json_schema() -> dict[str, Any]:
    """The schema, for editors: `# yaml-language-server: $schema=…` on a policy's first line."""
    schema = policy_model().model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text(node: Any, indent: str = "") -> str:
    """The schema as JSON with one property per line."""
    is_object = isinstance(node, dict) and "properties" in node
    is_map = isinstance(node, dict) and node and all(isinstance(v, dict) for v in node.values())
    if not (is_object or is_map):
        return json.dumps(node, ensure_ascii=False)
    inner = indent + "  "
    lines = (f"{inner}{json.dumps(k)}: {schema_text(v, inner)}" for k, v in node.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def tensors_of(
    assignment: PolicyAssignment, named: Sequence[tuple[str, nn.Parameter]], apart: set[int]
) -> list[dict[str, Any]]:
    """How each trained parameter is reduced."""
    tensors = []
    for name, p in named:
        if not p.requires_grad:
            continue
        spec = spec_of(name, p)
        rule, choice = assignment.rule_of(spec), assignment.choice_of(spec)
        reduced = "dense" if choice.method is None else choice.method.summary
        if assignment.candidates_of(spec):
            reduced = "as the planner decides"
        if choice.bucket:
            reduced += f" in bucket {choice.bucket!r}"
        if p.dtype not in SPARSE_DTYPES:
            reduced = "dense"
        if id(p) in apart:
            rule, reduced = None, "gathered: its gradients are sparse"
        place = None if rule is None else rule.place
        tensors.append({"name": name, "numel": spec.numel, "rule": place, "reduced": reduced})
    return tensors


VALIDATE = Command(
    name="validate",
    summary="check a policy file",
    examples=(
        "hvd-sparse validate policy.yaml",
        "hvd-sparse validate policy.yaml --model torchvision.models:resnet18",
        "hvd-sparse validate --schema > policy.schema.json",
    ),
    add_arguments=add_arguments,
    run=run,
)
