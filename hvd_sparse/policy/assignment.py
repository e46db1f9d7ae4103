"""Rules on tensors: the first one that matches decides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hvd_sparse.engine import Choice, Method, TensorSpec

DENSE = Choice(None)


@dataclass(frozen=True)
class Condition:
    """The conditions of a rule on a tensor, as in `schema.Match`; None is no condition."""

    name: str | None = None
    name_regex: str | None = None
    min_numel: int | None = None
    max_numel: int | None = None
    ndim: int | None = None
    dtype: str | None = None
    module: str | None = None

    def matches(self, spec: TensorSpec, module: str | None) -> bool:
        """Whether a tensor, owned by a module of that class, meets all conditions."""
        return (
            (self.name is None or fnmatchcase(spec.name, self.name))
            and (self.name_regex is None or re.fullmatch(self.name_regex, spec.name) is not None)
            and (self.min_numel is None or spec.numel >= self.min_numel)
            and (self.max_numel is None or spec.numel <= self.max_numel)
            and self.ndim in (None, len(spec.shape))
            and self.dtype in (None, spec.dtype.removeprefix("torch."))
            and self.module in (None, module)
        )


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        place: Its place in the policy.
        condition: Which tensors it is for.
        methods: How they are compressed: one method, or the planner's candidates; none: not at all.
        bucket: Name of their bucket, or "".
        is_auto: Whether a planner chooses among the methods, and may leave tensors dense.
    """

    place: int
    condition: Condition
    methods: tuple[Method, ...]
    bucket: str
    is_auto: bool

    @property
    def choice(self) -> Choice:
        """How it reduces a tensor; dense where a planner decides."""
        return DENSE if self.is_auto or not self.methods else Choice(self.methods[0], self.bucket)

    @property
    def description(self) -> str:
        """The rule in words."""
        methods = " or ".join(method.description for method in self.methods) or "dense"
        return f"{self.condition} {self.bucket!r} {'planned: ' * self.is_auto}{methods}"


class PolicyAssignment:
    """The assignment that a policy makes for a model.

    Args:
        rules: In order.
        modules: Class of the owning module, by parameter name; where rules ask for it.
    """

    def __init__(self, rules: Sequence[Rule], modules: Mapping[str, str]) -> None:
        self.rules = tuple(rules)
        self.modules = dict(modules)

    @property
    def description(self) -> str:
        """All rules in words."""
        return "policy " + "; ".join(rule.description for rule in self.rules)

    def rule_of(self, spec: TensorSpec) -> Rule | None:
        """The rule that decides on a tensor."""
        module = self.modules.get(spec.name)
        return next((rule for rule in self.rules if rule.condition.matches(spec, module)), None)

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor is reduced; dense where a planner decides on it, or no rule matches."""
        rule = self.rule_of(spec)
        return DENSE if rule is None else rule.choice

    def candidates_of(self, spec: TensorSpec) -> tuple[Method, ...]:
        """The methods that a planner may choose from; none where the rule decides itself."""
        rule = self.rule_of(spec)
        return rule.methods if rule is not None and rule.is_auto else ()

    @property
    def clip_norm(self) -> float | None:
        """The limit, which is the same in all methods."""
        return next((m.clip_norm for rule in self.rules for m in rule.methods), None)

    def idle_rules(self, specs: Iterable[TensorSpec]) -> list[tuple[Rule, str]]:
        """Rules that apply to none of a model's tensors, with the reason."""
        tensors = [(spec, self.rule_of(spec), self.modules.get(spec.name)) for spec in specs]
        idle = []
        for rule in self.rules:
            met = [(spec, first) for spec, first, m in tensors if rule.condition.matches(spec, m)]
            if not met:
                idle.append((rule, f"matches none of the {len(tensors)} parameters"))
            elif all(first is not rule for _, first in met):
                places = sorted({first.place for _, first in met if first is not None})
                names = " and ".join(f"rules[{place}]" for place in places)
                idle.append((rule, f"is shadowed: {names} decide{'s' * (len(places) == 1)} before"))
        return idle

    def unreachable_rules(self) -> list[tuple[Rule, str]]:
        """Rules behind one that matches everything, whatever the model."""
        for rule in self.rules:
            if rule.condition == Condition():
                reason = f"is shadowed: rules[{rule.place}] matches everything"
                return [(later, reason) for later in self.rules[rule.place + 1 :]]
        return []
