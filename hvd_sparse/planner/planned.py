"""The assignment that a plan makes, which stays what it is when the planner changes its mind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hvd_sparse.engine.plan import Choice, Method, TensorSpec
from hvd_sparse.planner.choose import Placement

DENSE = Choice(None)


class PlannableRules(Protocol):
    """An assignment that leaves some tensors to a planner; the same on all ranks."""

    @property
    def description(self) -> str:
        """See `Assignment.description`."""

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor without candidates is reduced."""

    def candidates_of(self, spec: TensorSpec) -> tuple[Method, ...]:
        """Methods of which the planner may choose one for the tensor, or dense."""


@dataclass(frozen=True)
class Planned:
    """Rules, and what becomes of the tensors that they leave open.

    Attributes:
        rules: Which tensors are plannable, and how all others are reduced.
        placements: Of plannable tensors by name; one that is not in it is dense.
        planner: Whose plan it is.
    """

    rules: PlannableRules
    placements: Mapping[str, Placement]
    planner: object

    @property
    def description(self) -> str:
        """See `Assignment.description`."""
        words = "; ".join(
            f"{name}: {p.method} in {p.bucket}" for name, p in sorted(self.placements.items())
        )
        return f"{self.rules.description}; planned: {words or 'all dense'}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        """See `Assignment.choice_of`; plannable tensors are dense where no plan says otherwise."""
        candidates = self.rules.candidates_of(spec)
        if not candidates:
            return self.rules.choice_of(spec)
        placement = self.placements.get(spec.name)
        if placement is None:
            return DENSE
        found = next((m for m in candidates if m.description == placement.method), None)
        return DENSE if found is None else Choice(found, placement.bucket)
