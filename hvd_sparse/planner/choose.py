"""The search for a plan: which tensors are compressed, by which method, in which buckets.

Every choice is judged by the predicted time of the whole step. DRAGONN's equation (1) compares
encode + decode with dense - sparse for one tensor alone. Beside a backward pass it also
matters when a gradient comes and what is under way then: a tensor that backward hides already need
not be compressed.

The search takes each group of tensors that may use the same methods. It tries to compress the
tensors whose gradients come last, or the largest ones, by every method and in several numbers of
buckets. It then moves single tensors between buckets, and changes the method of single buckets, as
long as the step gets faster. Among equally fast plans, the one that compresses least wins.

The prediction: gradients become ready one after the other, at `ready_s`. Horovod's dense reductions
and the engine's sparse ones share one resource (the network, or the cores of one host), which
serves them as they become ready:

    finish = max(finish, ready_s) + seconds

Horovod fuses its dense tensors, so its fixed cost counts once, at the end. A bucket is ready with
its last tensor, and has a fixed cost of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvd_sparse.engine.bucketing import Method, MethodId, TensorSpec
from hvd_sparse.planner.costs import Profile

MARGIN = 0.9
"""A plan must be predicted to take less than this share of the dense time. The rest is room for the
prediction's error: compressing must not turn out slower than dense."""
DOUBT = 0.5
"""A method may turn out to cost as little as this share of its prediction."""
MOST_OFF = 16.0
"""Largest factor by which measured dense steps correct the dense costs."""
BISECTIONS = 20
BUCKET_COUNTS = (1, 2, 4, 8)
CUTS = 24
"""How many ends of an order of tensors are tried."""
REFINED_TENSORS = 64
"""How many tensors are refined one by one: the largest ones."""
LEAST_STEP = 1e-3
"""Share of the predicted time that a change must save."""
PARTS = ("encode", "exchange", "decode")


@dataclass(frozen=True)
class TimedTensor:
    """A tensor, the seconds from the first gradient to its own, and methods that may reduce it.

    Without candidates it stays dense.
    """

    spec: TensorSpec
    ready_s: float
    candidates: tuple[Method, ...]


@dataclass(frozen=True)
class Placement:
    """By which method one tensor is compressed, and in which bucket."""

    method: MethodId
    bucket: str


@dataclass(frozen=True)
class ChosenPlan:
    """A plan, and the predicted seconds from the first gradient to the last result.

    Tensors without a placement are dense; `dense_s` is the prediction with everything dense.
    """

    placements: Mapping[str, Placement]
    predicted_s: float
    dense_s: float


def choose_plan(
    profile: Profile, tensors: Sequence[TimedTensor], margin: float = MARGIN
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
            if seconds < (1 - LEAST_STEP) * found_s:
                found, found_s = candidate, seconds
        chosen, best_s = found, found_s
    chosen, best_s = _refined(profile, tensors, chosen, best_s)
    if best_s >= margin * dense_s:
        chosen, best_s = {}, dense_s
    return ChosenPlan(chosen, best_s, dense_s)


def contenders(profile: Profile, tensors: Sequence[TimedTensor], most: int) -> list[ChosenPlan]:
    """Plans that may turn out to be the fastest, the best predicted first.

    They are the best plan of all, which may mix methods, and the best plan by each method alone.
    Where no plan by a method is predicted to be faster than dense, the plan that would be faster if
    the method cost only `DOUBT` of its prediction takes part. The last of them compresses all
    tensors by the best method in the fewest buckets: no exchange then runs beside backward, and
    Horovod has no dense tensor left, which saves time that no prediction counts.

    Raises:
        ConfigError: The profile has no costs of a candidate.
    """
    doubted = profile.calibrated(1.0, DOUBT)
    methods = sorted({m.id for tensor in tensors for m in tensor.candidates}, key=str)
    plans: list[ChosenPlan] = []

    def enter(plan: ChosenPlan) -> None:
        if plan.placements and all(plan.placements != other.placements for other in plans):
            plans.append(plan)

    if len(methods) > 1:
        enter(choose_plan(profile, tensors, 1.0))
    for method in methods:
        only = [restricted(tensor, method) for tensor in tensors]
        plan = choose_plan(profile, only, 1.0)
        if not plan.placements:
            placements = choose_plan(doubted, only, 1.0).placements
            plan = ChosenPlan(placements, predict(profile, tensors, placements), plan.dense_s)
        enter(plan)
    plans.sort(key=lambda plan: plan.predicted_s)
    if plans:
        best = next(iter(plans[0].placements.values())).method
        everything = _everything([restricted(tensor, best) for tensor in tensors])
        if all(plan.placements != everything for plan in plans):
            seconds = predict(profile, tensors, everything)
            plans[most - 1 :] = [ChosenPlan(everything, seconds, plans[0].dense_s)]
    return sorted(plans[:most], key=lambda plan: plan.predicted_s)


def dense_plan(profile: Profile, tensors: Sequence[TimedTensor]) -> ChosenPlan:
    """Nothing is compressed."""
    seconds = predict(profile, tensors, {})
    return ChosenPlan({}, seconds, seconds)


def matched_to(profile: Profile, tensors: Sequence[TimedTensor], dense_s: float) -> Profile:
    """The profile with dense costs multiplied so that `dense_s` is what is predicted for dense."""
    low, high = 1 / MOST_OFF, MOST_OFF
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if predict(profile.calibrated(middle, 1.0), tensors, {}) < dense_s:
            low = middle
        else:
            high = middle
    return profile.calibrated(high, 1.0)


def restricted(tensor: TimedTensor, method: MethodId) -> TimedTensor:
    """The tensor with this candidate only, if it has it."""
    only = tuple(m for m in tensor.candidates if m.id == method)
    return replace(tensor, candidates=only or tensor.candidates)


def _groups(tensors: Sequence[TimedTensor]) -> list[list[TimedTensor]]:
    """Tensors that may share buckets, in the order in which they become ready."""
    groups: dict[tuple[str, tuple[MethodId, ...]], list[TimedTensor]] = {}
    for tensor in sorted(tensors, key=lambda t: t.ready_s):
        if tensor.candidates and tensor.spec.numel:
            key = (tensor.spec.dtype, tuple(m.id for m in tensor.candidates))
            groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _everything(tensors: Sequence[TimedTensor]) -> dict[str, Placement]:
    """All tensors by their first candidate, in the fewest buckets."""
    placements: dict[str, Placement] = {}
    for number, group in enumerate(_groups(tensors)):
        method, total = group[0].candidates[0], sum(tensor.spec.numel for tensor in group)
        fewest = -(-total // method.bucket_numel_on())
        placements |= _split(group, total, method, fewest, str(number))
    return placements


def _options(group: Sequence[TimedTensor], label: str) -> list[dict[str, Placement]]:
    """Ends of two orders, by every candidate and in several numbers of buckets; the least first."""
    by_arrival = sorted(group, key=lambda tensor: (tensor.ready_s, tensor.spec.numel))
    by_size = sorted(group, key=lambda tensor: tensor.spec.numel)
    ends = {frozenset(t.spec.name for t in end) for o in (by_arrival, by_size) for end in _ends(o)}
    options = []
    for names in sorted(ends, key=lambda names: (len(names), sorted(names))):
        compressed = [tensor for tensor in group if tensor.spec.name in names]
        total = sum(tensor.spec.numel for tensor in compressed)
        for method in compressed[0].candidates:
            fewest = -(-total // method.bucket_numel_on())
            for count in sorted({max(fewest, n) for n in BUCKET_COUNTS if n <= len(compressed)}):
                options.append((total, _split(compressed, total, method, count, label)))
    return [placements for _, placements in sorted(options, key=lambda option: option[0])]


def _ends(tensors: Sequence[TimedTensor]) -> list[Sequence[TimedTensor]]:
    """The last tensors of an order: about `CUTS` ends, whose elements grow alike."""
    total = sum(tensor.spec.numel for tensor in tensors)
    ends, taken, cut = [], 0, 1
    for place in range(len(tensors) - 1, -1, -1):
        taken += tensors[place].spec.numel
        if taken * CUTS >= cut * total:
            ends.append(tensors[place:])
            cut = taken * CUTS // total + 1
    return ends


def _refined(
    profile: Profile, tensors: Sequence[TimedTensor], chosen: dict[str, Placement], best_s: float
) -> tuple[dict[str, Placement], float]:
    """Change one tensor, or one bucket's method, as long as the step gets faster by it."""
    open_tensors = {t.spec.name: t for t in tensors if t.candidates and t.spec.numel}
    by_size = sorted(open_tensors.values(), key=lambda t: t.spec.numel, reverse=True)
    for tensor in by_size[:REFINED_TENSORS]:
        name = tensor.spec.name
        mine = {method.id for method in tensor.candidates}
        alike = {p for n, p in chosen.items() if open_tensors[n].spec.dtype == tensor.spec.dtype}
        others = sorted(
            (p for p in alike if p.method in mine and p != chosen.get(name)),
            key=lambda p: (str(p.method), p.bucket),
        )
        for placement in (None, *others) if name in chosen else others:
            candidate = {n: p for n, p in chosen.items() if n != name}
            if placement is not None:
                candidate[name] = placement
            seconds = predict(profile, tensors, candidate)
            if seconds < (1 - LEAST_STEP) * best_s:
                chosen, best_s = candidate, seconds
    for placement in sorted(set(chosen.values()), key=lambda p: p.bucket):
        held = [name for name, p in chosen.items() if p == placement]
        common = set.intersection(*({m.id for m in open_tensors[n].candidates} for n in held))
        for method in sorted(common, key=str):
            candidate = chosen | dict.fromkeys(held, Placement(method, placement.bucket))
            seconds = predict(profile, tensors, candidate)
            if seconds < (1 - LEAST_STEP) * best_s:
                chosen, best_s = candidate, seconds
    return chosen, best_s


def _split(
    tensors: Sequence[TimedTensor], total: int, method: Method, count: int, label: str
) -> dict[str, Placement]:
    """Tensors in the order of their arrival, in about equal buckets."""
    placements, before = {}, 0
    for tensor in tensors:
        bucket = before * count // total
        placements[tensor.spec.name] = Placement(method.id, f"planned {label}.{bucket}")
        before += tensor.spec.numel
    return placements


@dataclass(frozen=True)
class Job:
    """One reduction of a step: of a dense tensor, or of a bucket, which has `parts`."""

    ready_s: float
    seconds: float
    parts: tuple[tuple[str, float], ...] = ()
    label: str = ""


class Span(NamedTuple):
    """When a job of a step begins and is done, from the first gradient on."""

    job: Job
    start_s: float
    stop_s: float


def schedule(jobs: Sequence[Job]) -> Iterator[Span]:
    """The jobs' times, one after the other."""
    time_s = 0.0
    for job in sorted(jobs, key=lambda job: job.ready_s):
        start_s = max(time_s, job.ready_s)
        time_s = start_s + job.seconds
        yield Span(job, start_s, time_s)


def finish_s(jobs: Sequence[Job], fixed_s: float) -> float:
    """When the last of the jobs is done."""
    return max((span.stop_s for span in schedule(jobs)), default=0.0) + fixed_s


def predict(
    profile: Profile, tensors: Sequence[TimedTensor], placements: Mapping[str, Placement]
) -> float:
    """Seconds from the first gradient to the last result."""
    return finish_s(jobs_of(profile, tensors, placements), profile.dense.fixed_s)


def jobs_of(
    profile: Profile, tensors: Sequence[TimedTensor], placements: Mapping[str, Placement]
) -> list[Job]:
    """A plan's reductions: dense tensors' shares of Horovod's fused allreduce, and buckets."""
    jobs: list[Job] = []
    buckets: dict[Placement, list[TimedTensor]] = {}
    for tensor in tensors:
        spec = tensor.spec
        if spec.name in placements:
            buckets.setdefault(placements[spec.name], []).append(tensor)
        else:
            seconds = profile.dense.per_element_s * spec.numel
            jobs.append(Job(tensor.ready_s, seconds, label=spec.name))
    for placement, held in buckets.items():
        numel = sum(tensor.spec.numel for tensor in held)
        costs = profile.costs_of(placement.method)
        parts = tuple((name, getattr(costs, name).at(numel)) for name in PARTS)
        ready_s, seconds = max(t.ready_s for t in held), sum(part_s for _, part_s in parts)
        jobs.append(Job(ready_s, seconds, parts, placement.bucket))
    return jobs
