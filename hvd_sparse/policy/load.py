"""From a policy file to an assignment, or to one error that says where."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from torch.nn import Module, Parameter

from hvd_sparse.checks import check_timeout, optional
from hvd_sparse.collectives.registry import LOSSLESS_CANDIDATES
from hvd_sparse.engine import Method, TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS
from hvd_sparse.methods.method_options import AUTOMATIC, SEPARATOR, check_collective
from hvd_sparse.policy.assignment import Condition, PolicyAssignment, Rule
from hvd_sparse.policy.document import Document, Path, read_file, shown, suggestion
from hvd_sparse.policy.schema import Match, policy_model


@dataclass(frozen=True)
class Policy:
    """A policy that has been checked; `policy_model` says what each key means."""

    document: Document
    rules: tuple[Rule, ...]
    transport: str
    timeout_s: float
    busy_timeout_s: float | None
    hierarchical: bool | Literal["auto"]
    profile: str | None
    plan_cache: str | None


def load_policy(source: str | os.PathLike[str] | Mapping[str, Any]) -> Policy:
    """Read and check a policy.

    Args:
        source: A path, or what such a file holds.

    Raises:
        ConfigError: It cannot be read, or something in it is wrong; the message names file, line
            and key.
    """
    if isinstance(source, Mapping):
        return check_policy(Document("policy", dict(source)))
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"policy must be a path or a mapping, got {source!r}")
    return check_policy(read_file(os.fspath(source)))


def check_policy(document: Document) -> Policy:
    """Check what was read.

    Raises:
        ConfigError: As `load_policy`.
    """
    model = policy_model()
    if not isinstance(document.data, dict):
        raise document.error((), f"a policy is a mapping with {', '.join(model.model_fields)}")
    try:
        policy: Any = model.model_validate(document.data)
    except ValidationError as error:
        raise _located(document, error, model) from None
    defaults = policy.defaults.model_dump(exclude_unset=True)
    made: dict[Any, Method] = {}
    rules = tuple(
        _rule(document, place, rule, defaults, made) for place, rule in enumerate(policy.rules)
    )
    taken = taken_by(rules)
    for key in defaults:
        if key not in taken:
            raise document.error(("defaults", key), f"no rule takes this: {suggestion(key, taken)}")
    limits = {m.clip_norm: rule.place for rule in rules for m in rule.methods}
    if len(limits) > 1:
        (one, _), (other, place) = list(limits.items())[:2]
        raise document.error(
            ("rules", place), f"clip_norm must be the same in all rules, got {one} and {other}"
        )
    for key, check in (("timeout_s", check_timeout), ("busy_timeout_s", optional(check_timeout))):
        try:
            check(key, getattr(policy, key))
        except ConfigError as error:
            raise document.error((key,), str(error).removeprefix(f"{key} ")) from None
    if not rules:
        raise document.error(("rules",), "must have a rule at least, got []")
    if policy.hierarchical is True and any(rule.is_auto for rule in rules):
        raise document.error(("hierarchical",), "compress: auto plans for one level")
    settings = {item.name: getattr(policy, item.name) for item in fields(Policy)[2:]}
    return Policy(document, rules, **settings)


def assign(
    policy: Policy, named: Sequence[tuple[str, Parameter]] | None, model: Module | None
) -> PolicyAssignment:
    """The policy's assignment for a model; warns of rules that decide on none of its parameters.

    Args:
        policy: The policy.
        named: The model's parameters by name; None where they are not known yet.
        model: The model itself, where rules ask for classes of modules.

    Raises:
        ConfigError: A rule asks for a module's class, but there is no model.
    """
    assignment = PolicyAssignment(policy.rules, owning_modules(model, named or ()))
    asking = [rule for rule in policy.rules if rule.condition.module is not None]
    if asking and model is None:
        path = ("rules", asking[0].place, "match", "module")
        raise policy.document.error(path, "model must be given where a rule asks for a module")
    for warning in warnings_of(policy, assignment, named):
        warnings.warn(f"hvd_sparse: {warning}", stacklevel=3)
    return assignment


def warnings_of(
    policy: Policy, assignment: PolicyAssignment, named: Sequence[tuple[str, Parameter]] | None
) -> list[str]:
    """Rules that decide on nothing (in any model, without one) or do not compress, with places."""
    if named is None:
        idle = assignment.unreachable_rules()
    else:
        idle = assignment.idle_rules(
            TensorSpec(name, tuple(p.shape), str(p.dtype)) for name, p in named if p.requires_grad
        )
    whole = "density 1 sends all entries, which is no compression; compress: never says so"
    idle += [(r, whole) for r in policy.rules if any(m.density == 1 for m in r.methods)]
    return [str(policy.document.error(("rules", rule.place), reason)) for rule, reason in idle]


def taken_by(rules: Iterable[Rule]) -> set[str]:
    """The keys of `defaults` that the rules' compressors take; all, where no rule compresses."""
    names = {m.name for rule in rules for m in rule.methods} or set(METHODS)
    taken = {item.name for name in names for item in fields(METHODS[name])}
    return taken | {"compressor", "bucket"}


def owning_modules(model: Module | None, named: Iterable[tuple[str, Parameter]]) -> dict[str, str]:
    """The class of the module that owns each parameter, by name, where the model has it."""
    modules = () if model is None else model.modules()
    owners = {id(p): type(m).__name__ for m in modules for p in m.parameters(recurse=False)}
    return {name: owners[id(p)] for name, p in named if id(p) in owners}


def sparse_embeddings(model: Module) -> set[int]:
    """The `id` of each parameter whose gradients are sparse tensors, which no policy is for."""
    modules = (module for module in model.modules() if getattr(module, "sparse", None) is True)
    return {id(p) for module in modules for p in module.parameters(recurse=False)}


def _rule(
    document: Document, place: int, rule: Any, defaults: dict[str, Any], made: dict[Any, Method]
) -> Rule:
    """One rule; methods that several rules share are made once."""
    path: Path = ("rules", place)
    condition = _condition(document, (*path, "match"), rule.match)
    own = rule.model_dump(exclude_unset=True, exclude={"match", "compress"})
    if rule.compress == "never":
        if own:
            key = next(iter(own))
            raise document.error((*path, key), "says how to compress, but compress is never")
        return Rule(place, condition, (), "", is_auto=False)
    settings = defaults | own
    name = settings.pop("compressor", None)
    if name is None:
        raise document.error(path, f"compressor must be given, one of {', '.join(METHODS)}")
    bucket = settings.pop("bucket", None) or ""
    is_auto = rule.compress == "auto"
    if is_auto and "bucket" in own:
        raise document.error((*path, "bucket"), "cannot be named where compress is auto")
    taken = {item.name: item for item in fields(METHODS[name])}
    for key in own:
        if key not in taken and key not in ("compressor", "bucket"):
            raise document.error(
                (*path, key), f"{name} has no such argument: {suggestion(key, taken)}"
            )
    arguments = {key: value for key, value in settings.items() if key in taken}
    for key, item in taken.items():
        if item.default is MISSING and key not in arguments:
            raise document.error(path, f"{key} must be given: {name} needs it")
    variants, methods = [arguments], []
    try:
        if is_auto and "collective" in taken:
            variants = [{**arguments, "collective": each} for each in collectives_of(arguments)]
        for variant in variants:
            key = (name, *variant.items())
            made[key] = made.get(key) or METHODS[name](**variant).make()
            methods.append(made[key])
    except ConfigError as error:
        raise _of_argument(document, path, own, arguments, str(error)) from None
    if is_auto and any(method.clip_norm is not None for method in methods):
        raise document.error(
            (*path, "compress"), "auto is not for clip_norm: dense tensors would not be clipped"
        )
    return Rule(place, condition, tuple(methods), bucket, is_auto)


def collectives_of(arguments: Mapping[str, Any]) -> Sequence[Any]:
    """Those among which a planner chooses: the ones that a rule names, or all lossless ones.

    Raises:
        ConfigError: They cannot be chosen from.
    """
    named = arguments.get("collective", AUTOMATIC)
    if named == AUTOMATIC:
        return LOSSLESS_CANDIDATES
    return check_collective("collective", named).split(SEPARATOR)


def _of_argument(
    document: Document, path: Path, own: dict[str, Any], arguments: dict[str, Any], message: str
) -> ConfigError:
    """An error of a method's options, at the one that it names."""
    key, _, words = message.partition(" ")
    if key not in arguments:
        return document.error(path, message)
    return document.error((*path, key) if key in own else ("defaults", key), words)


def _condition(document: Document, path: Path, match: Match) -> Condition:
    condition = Condition(**dict(match))
    if condition.name is not None and condition.name_regex is not None:
        raise document.error((*path, "name_regex"), "name and name_regex exclude each other")
    try:
        re.compile(condition.name_regex or "")
    except (re.error, RecursionError, OverflowError, FutureWarning) as error:
        hint = "; a glob, as *.weight, belongs in name" if match.name_regex[0] == "*" else ""
        raise document.error(
            (*path, "name_regex"), f"not a regular expression: {error}{hint}"
        ) from None
    if condition.max_numel is not None and condition.max_numel < (condition.min_numel or 0):
        raise document.error(
            (*path, "max_numel"), f"must be at least min_numel, got {match.max_numel}"
        )
    return condition


def _located(document: Document, error: ValidationError, model: type[BaseModel]) -> ConfigError:
    """Pydantic's first complaint, in our words; of a union all that would do."""
    complaints = error.errors(include_url=False)
    first, path = complaints[0], _path_in(document.data, complaints[0]["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        return document.error(path, f"unknown key: {suggestion(str(path[-1]), _keys(model, path))}")
    if kind == "missing":
        return document.error(path, f"{first['loc'][-1]} must be given")
    alike = [_wanted(each) for each in complaints if _path_in(document.data, each["loc"]) == path]
    wanted = " or ".join([alike[0], *(each.removeprefix("must be ") for each in alike[1:])])
    return document.error(path, f"{wanted}, got {shown(first['input'])}")


def _wanted(complaint: ErrorDetails) -> str:
    context = complaint.get("ctx", {})
    return {
        "literal_error": f"must be {context.get('expected', '')}",
        "greater_than_equal": f"must be a whole number of at least {context.get('ge')}",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "list_type": "must be a list",
        "model_type": "must be a mapping",
        "dict_type": "must be a mapping",
    }.get(complaint["type"], complaint["msg"])


def _path_in(data: Any, location: Path) -> Path:
    """The part of pydantic's location that leads through the data: it also names types."""
    path: Path = ()
    for part in location:
        there = isinstance(data, list) if isinstance(part, int) else isinstance(data, dict)
        if not there or (isinstance(part, str) and part not in data):
            break
        path, data = (*path, part), data[part]
    return path


def _keys(model: type[BaseModel], path: Path) -> list[str]:
    """Keys that may stand beside the last one of a path."""
    if len(path) == 1:
        return list(model.model_fields)
    if path[0] == "rules":
        if "match" in path[:-1]:
            return list(Match.model_fields)
        (rule,) = model.model_fields["rules"].annotation.__args__  # type: ignore[union-attr]
        return list(rule.model_fields)
    annotation: Any = model.model_fields["defaults"].annotation
    return list(annotation.model_fields)
