"""The search for a plan: which tensors are sparse, by which method, in which buckets.

Costs are lines, so a tensor's size alone says on which side of DRAGONN's equation (1) it lies: the
larger ones are compressed and the smaller ones are dense, together. For each group of tensors that
may be compressed by the same candidates, every such cut, candidate and number of buckets is
predicted, and the fastest is taken if it is faster than dense by more than a margin. A planner that
trains tries several of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hvd_sparse.engine.plan import Method, TensorSpec
from hvd_sparse.planner.predict import Job, bucket_job, dense_job, finish_s
from hvd_sparse.planner.profile import Profile

MARGIN = 0.9
"""A plan must be predicted to take less than this share of the dense time. The rest is room for the
prediction's error: compressing must not turn out slower than dense."""
DOUBT = 0.5
"""A method may turn out to cost as little as this share of what was predicted."""
MOST_OFF = 16.0
"""Factor by which dense costs are corrected, at most, when dense steps have been measured."""
BISECTIONS = 20
BUCKET_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as the planner sees it.

    Attributes:
        spec: Name, shape, type.
        ready_s: When its gradient comes, from the first one on.
        candidates: Methods that may reduce it; none: it stays dense.
    """

    spec: TensorSpec
    ready_s: float
    candidates: tuple[Method, ...]


@dataclass(frozen=True)
class Placement:
    """What becomes of one sparse tensor.

    Attributes:
        method: The method's description.
        bucket: Name of its bucket.
    """

    method: str
    bucket: str


@dataclass(frozen=True)
class ChosenPlan:
    """A plan and what it is predicted to take.

    Attributes:
        placements: By name; a tensor that is not in it is dense.
        predicted_s: From the first gradient to the last result.
        dense_s: The same with everything dense.
    """

    placements: Mapping[str, Placement]
    predicted_s: float
    dense_s: float


def choose_plan(
    profile: Profile, tensors: Sequence[PlannedTensor], margin: float = MARGIN
) -> ChosenPlan:
    """The fastest plan by prediction, or all dense where none takes less than `margin` of that.

    Raises:
        ConfigError: The profile has no costs of a candidate.
    """
    dense_s = best_s = predict(profile, tensors, {})
    chosen: dict[str, Placement] = {}
    for number, group in enumerate(_groups(tensors)):
        found, found_s = chosen, best_s
        for placements in _options(group, str(number)):
            candidate = chosen | placements
            seconds = predict(profile, tensors, candidate)
            if seconds < found_s:
                found, found_s = candidate, seconds
        chosen, best_s = found, found_s
    if best_s >= margin * dense_s:
        chosen, best_s = {}, dense_s
    return ChosenPlan(chosen, best_s, dense_s)


def contenders(profile: Profile, tensors: Sequence[PlannedTensor], most: int) -> list[ChosenPlan]:
    """Plans that may turn out to be the fastest, the best predicted first.

    They are by different methods. Where no plan by a method is predicted to be faster than dense,
    one stands for it that would be faster if the method cost only `DOUBT` of what was predicted.
    The last place is for all tensors by the best of these methods, in the fewest buckets. Horovod
    then has no dense tensor left, and backward has no exchange beside it; no prediction counts what
    that saves.

    Args:
        profile: The costs.
        tensors: The model's.
        most: How many, at most.

    Raises:
        ConfigError: The profile has no costs of a candidate.
    """
    doubted = profile.calibrated(1.0, DOUBT)
    found: dict[frozenset[tuple[str, Placement]], ChosenPlan] = {}
    for method in sorted({m.description for tensor in tensors for m in tensor.candidates}):
        only = [restricted(tensor, method) for tensor in tensors]
        plan = choose_plan(profile, only, 1.0)
        if not plan.placements:
            placements = choose_plan(doubted, only, 1.0).placements
            plan = ChosenPlan(placements, predict(profile, tensors, placements), plan.dense_s)
        if plan.placements:
            found[frozenset(plan.placements.items())] = plan
    plans = sorted(found.values(), key=lambda plan: plan.predicted_s)
    if plans:
        best = next(iter(plans[0].placements.values())).method
        everything = _everything([restricted(tensor, best) for tensor in tensors])
        if frozenset(everything.items()) not in found:
            seconds = predict(profile, tensors, everything)
            plans[most - 1 :] = [ChosenPlan(everything, seconds, plans[0].dense_s)]
    return sorted(plans[:most], key=lambda plan: plan.predicted_s)


def dense_plan(profile: Profile, tensors: Sequence[PlannedTensor]) -> ChosenPlan:
    """Nothing is compressed."""
    seconds = predict(profile, tensors, {})
    return ChosenPlan({}, seconds, seconds)


def matched_to(profile: Profile, tensors: Sequence[PlannedTensor], dense_s: float) -> Profile:
    """The profile with dense costs multiplied so that `dense_s` is what is predicted for dense."""
    low, high = 1 / MOST_OFF, MOST_OFF
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if predict(profile.calibrated(middle, 1.0), tensors, {}) < dense_s:
            low = middle
        else:
            high = middle
    return profile.calibrated(high, 1.0)


def restricted(tensor: PlannedTensor, description: str) -> PlannedTensor:
    """A tensor that may only be compressed by one of its candidates, if it has that one."""
    only = tuple(m for m in tensor.candidates if m.description == description)
    return replace(tensor, candidates=only or tensor.candidates)


def predict(
    profile: Profile, tensors: Sequence[PlannedTensor], placements: Mapping[str, Placement]
) -> float:
    """Seconds from the first gradient to the last result."""
    jobs = [
        dense_job(profile, tensor.spec.numel, tensor.ready_s)
        for tensor in tensors
        if tensor.spec.name not in placements
    ]
    return finish_s(jobs + bucket_jobs(profile, tensors, placements), profile.dense.fixed_s)


def bucket_jobs(
    profile: Profile, tensors: Sequence[PlannedTensor], placements: Mapping[str, Placement]
) -> list[Job]:
    """The buckets of a plan."""
    buckets: dict[Placement, list[PlannedTensor]] = {}
    for tensor in tensors:
        if tensor.spec.name in placements:
            buckets.setdefault(placements[tensor.spec.name], []).append(tensor)
    return [
        bucket_job(
            profile.costs_of(placement.method),
            [t.spec.numel for t in held],
            [t.ready_s for t in held],
        )
        for placement, held in buckets.items()
    ]


def _groups(tensors: Sequence[PlannedTensor]) -> list[list[PlannedTensor]]:
    """Tensors that may share buckets, in the order in which they become ready."""
    groups: dict[tuple[str, ...], list[PlannedTensor]] = {}
    for tensor in sorted(tensors, key=lambda t: t.ready_s):
        if tensor.candidates and tensor.spec.numel:
            key = (tensor.spec.dtype, *(m.description for m in tensor.candidates))
            groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _everything(tensors: Sequence[PlannedTensor]) -> dict[str, Placement]:
    """All tensors by their first candidate, in the fewest buckets."""
    placements: dict[str, Placement] = {}
    for number, group in enumerate(_groups(tensors)):
        method, total = group[0].candidates[0], sum(tensor.spec.numel for tensor in group)
        placements |= _split(group, total, method, -(-total // method.bucket_numel), str(number))
    return placements


def _options(group: Sequence[PlannedTensor], label: str) -> list[dict[str, Placement]]:
    """Every cut by size, with every candidate and number of buckets; `group` as it arrives."""
    numels = sorted({1 << (tensor.spec.numel.bit_length() - 1) for tensor in group}, reverse=True)
    options = []
    for least in numels:
        compressed = [tensor for tensor in group if tensor.spec.numel >= least]
        total = sum(tensor.spec.numel for tensor in compressed)
        for method in compressed[0].candidates:
            fewest = -(-total // method.bucket_numel)
            for count in sorted({max(fewest, n) for n in BUCKET_COUNTS if n <= len(compressed)}):
                options.append(_split(compressed, total, method, count, label))
    return options


def _split(
    tensors: Sequence[PlannedTensor], total: int, method: Method, count: int, label: str
) -> dict[str, Placement]:
    """Tensors in the order of their arrival, in about equal buckets."""
    placements, before = {}, 0
    for tensor in tensors:
        bucket = before * count // total
        placements[tensor.spec.name] = Placement(method.description, f"planned {label}.{bucket}")
        before += tensor.spec.numel
    return placements
