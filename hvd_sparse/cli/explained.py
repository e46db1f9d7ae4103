"""What is said of a tensor of a plan: the terms of DRAGONN's equation (1), the choice, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_sparse.cli.candidates import short
from hvd_sparse.cli.units import shown_s
from hvd_sparse.planner.choose import MARGIN, ChosenPlan, PlannedTensor, jobs_of
from hvd_sparse.planner.predict import Verdict, schedule, verdict
from hvd_sparse.planner.profile import Profile
from hvd_sparse.policy.assignment import PolicyAssignment

HEADINGS = ("tensor", "elements", "ready", "dense", "sparse", "encode", "decode")
"""Of the columns of figures; the choice and the reason follow."""


def row_of(
    tensor: PlannedTensor,
    rules: PolicyAssignment,
    profile: Profile,
    plan: ChosenPlan,
    tensors: Sequence[PlannedTensor],
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
        row["shown"] = "dense" if method is None else short(method.description)
        row["reason"] = "the policy says so"
        return row
    if placement is not None:
        numels = {t.spec.name: t.spec.numel for t in tensors}
        whole = sum(numels[name] for name, p in plan.placements.items() if p == placement)
        found = verdict(profile, profile.costs_of(placement.method), spec.numel, whole)
        bucket = placement.bucket.removeprefix("planned ")
        row["choice"] = f"{placement.method}, bucket {bucket}"
        row["shown"] = f"{short(placement.method)}, {bucket}"
    else:
        every = [profile.costs_of(method.description) for method in tensor.candidates]
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
    tensor: PlannedTensor,
    profile: Profile,
    plan: ChosenPlan,
    tensors: Sequence[PlannedTensor],
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
