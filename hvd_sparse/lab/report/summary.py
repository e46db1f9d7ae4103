"""Figures of a recording: for tables, and as arrays that can be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.lab.report.log import Plan, Recording

Floats = NDArray[np.float64]

MOST_POINTS = 150
"""Most points of a curve; more cannot be told apart on a page."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LONG_GAP = 4
"""A curve has a hole where two points are this many times further apart than their neighbours."""
CLEARLY_LESS = 0.8
"""The slowest rank spends less time in exchanges than this share of the others' median."""
MANY_FAULTS = 5_000
"""Page faults in a step, of 4 KiB each, that are worth a word: some 10 ms."""
MOSTLY = 2 / 3
"""Share of the comparisons in which the slowest rank must have spent the least time."""


@dataclass(frozen=True)
class Curves:
    """Means per step over stretches of a run, buckets added up.

    A stretch begins after step `start` and ends with `step`. `dense_bytes` is what a ring allreduce
    of the same tensors would send. It is NaN where all tensors were dense, because nothing is known
    about Horovod's bytes; so are bytes and messages among the `figures`, named as in `StepStats`.
    """

    start: Floats
    step: Floats
    step_s: Floats
    dense_bytes: Floats
    figures: dict[str, Floats]


def dense_bytes(plan: Plan, world_size: int) -> float:
    """Bytes that each rank of a ring allreduce would send: 2 (P-1)/P times the gradient's."""
    nbytes = sum(b["numel"] * ITEM_BYTES.get(b["dtype"], 4) for b in plan.buckets)
    return float(2 * (world_size - 1) / world_size * nbytes)


def curves(recording: Recording) -> Curves:
    """The whole run in about `MOST_POINTS` stretches, each under one plan."""
    total = max(1, len(recording.steps))
    stretches: list[tuple[Plan, list[dict[str, Any]]]] = []
    for plan in recording.plans:
        if plan.steps:
            parts = min(len(plan.steps), max(1, round(MOST_POINTS * len(plan.steps) / total)))
            for part in np.array_split(np.arange(len(plan.steps)), parts):
                stretches.append((plan, [plan.steps[i] for i in part]))
    steps = np.array([sum(line["steps"] for line in lines) for _, lines in stretches], dtype=float)
    known = np.array([1.0 if plan.buckets else np.nan for plan, _ in stretches])
    sums = {
        name: np.array([sum(sum(line[name]) for line in lines) for _, lines in stretches])
        for name in FIGURES
    }
    figures = {name: column / steps for name, column in sums.items()}
    for name in ("bytes_sent", "bytes_received", "messages_sent"):
        figures[name] = figures[name] * known
    world_size = recording.run["world_size"]
    ends = [(lines[0]["step"] - lines[0]["steps"], lines[-1]["step"]) for _, lines in stretches]
    seconds = [sum(line["seconds"] for line in lines) for _, lines in stretches]
    return Curves(
        start=np.array([max(0, start) for start, _ in ends], dtype=np.float64),
        step=np.array([end for _, end in ends], dtype=np.float64),
        step_s=np.array(seconds, dtype=np.float64) / steps,
        dense_bytes=known * np.array([dense_bytes(plan, world_size) for plan, _ in stretches]),
        figures=figures,
    )


def last_plan(recording: Recording) -> Plan:
    """The last plan with buckets and steps; else the last plan with steps."""
    plans = [plan for plan in recording.plans if plan.steps]
    return next((plan for plan in reversed(plans) if plan.buckets), plans[-1])


def steps_of(recording: Recording) -> int:
    """Steps of the run, without those that the same process took before it."""
    first: int = recording.plans[0].step if recording.plans else 0
    last: int = recording.steps[-1]["step"] if recording.steps else first
    return max(0, last - first)


def faults_of(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Page faults per step: the median, as the first steps touch everything for the first time."""
    known = [line["faults"] / line["steps"] for line in lines]
    return float(np.median(known)) if known else None


def is_many(faults: float | None) -> bool:
    return faults is not None and faults > MANY_FAULTS


def faults_in_words(faults: float | None) -> str:
    """Page faults per step, and where they are many, what causes and what ends them."""
    if faults is None:
        return "not recorded"
    if not is_many(faults):
        return f"{faults:,.0f} per step"
    return (
        f"{faults:,.0f} per step: memory goes back to the system when it is freed, and each step "
        "pays for new pages. Start the job by `hvd-sparse tuned`, or with "
        "MALLOC_MMAP_THRESHOLD_=4294967296 and MALLOC_TRIM_THRESHOLD_=17179869184"
    )


def bucket_means(plan: Plan) -> dict[str, Floats]:
    """Means per step of every figure, one entry per bucket."""
    steps = sum(line["steps"] for line in plan.steps)
    return {
        name: np.sum([line[name] for line in plan.steps], axis=0, dtype=np.float64) / max(1, steps)
        for name in FIGURES
    }


def bucket_curve(plan: Plan, name: str, bucket: int) -> tuple[list[float], list[float]]:
    """Steps and values of a bucket's threshold, imbalance or residual norm, thinned.

    A NaN interrupts the curve where a value is missing or where nothing was recorded for long.
    """
    points: list[tuple[int, Any]]
    if name != "residual":
        points = [(line["step"], line[name][bucket]) for line in plan.steps]
    else:
        points = [(r["step"], r["norm"]) for r in plan.residuals if r["bucket"] == bucket]
    points = points[:: 1 + len(points) // MOST_POINTS]
    if not any(value for _, value in points):
        return [], []
    steps = [float(step) for step, _ in points]
    values = [float(value) if value else np.nan for _, value in points]
    return with_holes(steps, values)


def with_holes(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """The same points, with a NaN in every gap that is much longer than its neighbours."""
    gaps = np.diff(steps)
    beside = np.fmax(np.r_[np.nan, gaps[:-1]], np.r_[gaps[1:], np.nan])
    holes = np.flatnonzero(gaps > LONG_GAP * beside) + 1
    at = np.insert(steps, holes, np.take(steps, holes))
    return at.tolist(), np.insert(values, holes, np.nan).tolist()


def collectives(plan: Plan, buckets: Sequence[int]) -> list[str]:
    """The collectives that exchanged some buckets, in the order of their first use."""
    used = [line["collective"][b] for line in plan.steps for b in buckets]
    return [name for name in dict.fromkeys(used) if name]


def kinds(plan: Plan) -> list[str]:
    """How a plan's buckets were compressed, in words; each way once."""
    by_kind: dict[str, list[int]] = {}
    for place, bucket in enumerate(plan.buckets):
        words = f"{bucket['compressor']} at density {bucket['density']:.3g}, wire {bucket['wire']}"
        by_kind.setdefault(words, []).append(place)
    return [
        f"{words}, exchanged by {', then '.join(collectives(plan, places)) or 'nothing yet'}"
        for words, places in by_kind.items()
    ]


def rank_ms(recording: Recording) -> Floats:
    """Milliseconds per step in exchanges, one row per comparison and one column per rank."""
    steps = np.array([line["steps"] for line in recording.ranks], dtype=np.float64)
    every = np.array([line["exchange_s"] for line in recording.ranks], dtype=np.float64)
    return np.asarray(1e3 * every / steps[:, None], dtype=np.float64)


def slowest_rank(recording: Recording) -> int | None:
    """The rank that the others wait for: it clearly spends the least time in exchanges.

    None where no rank differs from the others by more than such figures vary.
    """
    if not recording.ranks or recording.run["world_size"] < 2:
        return None
    exchange_ms = rank_ms(recording)
    mean_ms = exchange_ms.mean(axis=0)
    slowest = int(mean_ms.argmin())
    others_ms = float(np.median(np.delete(mean_ms, slowest)))
    mostly = float((exchange_ms.argmin(axis=1) == slowest).mean()) >= MOSTLY
    return slowest if mostly and mean_ms[slowest] < CLEARLY_LESS * others_ms else None
