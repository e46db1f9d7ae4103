"""What tensors are assigned to, for trainings through either door."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hvd_sparse.engine import Choice, TensorSpec
from hvd_sparse.planner.costs import Line, MethodCosts, Profile, place_of
from hvd_sparse.planner.trial import Turn

FIRST_TURN_STEPS = sum(Turn.of(100.0))
"""That of all dense, since its reductions are said to take so long."""


class AllDense:
    """An assignment that leaves everything to Horovod, or to DDP."""

    description = "all dense"

    def choice_of(self, spec: TensorSpec) -> Choice:
        return Choice(None)


def policy_with_a_profile(world_size: int, **options: Any) -> dict[str, Any]:
    """It leaves all to a planner, whose profile promises much of compressing."""
    from hvd_sparse.policy import load_policy  # a device machine has no pydantic

    rule = {"compress": "auto", "compressor": "topk", "density": 1.0, **options}
    policy = {"version": 1, "transport": "gloo", "plan_cache": "none", "rules": [rule]}
    candidates = load_policy(policy).rules[0].methods
    costs = MethodCosts("oktopk", 1.0, *(Line(1e-9, 1e-12) for _ in range(3)))
    place = place_of("gloo", world_size, 1)
    methods = {method.id: costs for method in candidates}
    path = Path(tempfile.mkdtemp()) / "profile.json"
    Profile(place, Line(1.0, 1e-3), methods).save(path)
    return {**policy, "profile": str(path)}
