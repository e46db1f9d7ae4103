"""Figures of a recording, as arrays that can be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.recording.log import Plan, Recording

Floats = NDArray[np.float64]

MOST_POINTS = 150
"""Points of a curve: more cannot be told apart on a page."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Curves:
    """Means per step over stretches of a run, buckets added up.

    Attributes:
        step: Last step of each stretch.
        step_s: Seconds from step to step.
        dense_bytes: What a ring allreduce of the same tensors would send.
        figures: By name, as `StepStats` has them.
    """

    step: Floats
    step_s: Floats
    dense_bytes: Floats
    figures: dict[str, Floats]


def dense_bytes(plan: Plan, world_size: int) -> float:
    """Bytes that each rank of a ring allreduce would send: 2 (P-1)/P of the gradient."""
    nbytes = sum(b["numel"] * ITEM_BYTES.get(b["dtype"], 4) for b in plan.buckets)
    return float(2 * (world_size - 1) / world_size * nbytes)


def curves(recording: Recording) -> Curves:
    """The whole run, in at most `MOST_POINTS` stretches of equally many lines."""
    world_size = recording.run["world_size"]
    lines = [(line, dense_bytes(p, world_size)) for p in recording.plans for line in p.steps]
    stretches = [part for part in np.array_split(np.arange(len(lines)), MOST_POINTS) if len(part)]

    def per_step(values: list[float]) -> Floats:
        steps = [line["steps"] for line, _ in lines]
        return np.array(
            [sum(values[i] for i in part) / sum(steps[i] for i in part) for part in stretches]
        )

    return Curves(
        step=np.array([lines[part[-1]][0]["step"] for part in stretches], dtype=np.float64),
        step_s=per_step([line["seconds"] for line, _ in lines]),
        dense_bytes=per_step([dense * line["steps"] for line, dense in lines]),
        figures={name: per_step([sum(line[name]) for line, _ in lines]) for name in FIGURES},
    )


def bucket_means(plan: Plan) -> dict[str, Floats]:
    """Means per step of every figure, one entry per bucket."""
    steps = sum(line["steps"] for line in plan.steps)
    return {
        name: np.sum([line[name] for line in plan.steps], axis=0, dtype=np.float64) / max(1, steps)
        for name in FIGURES
    }


def bucket_curve(plan: Plan, name: str, bucket: int) -> tuple[list[int], list[float]]:
    """Steps and values of a bucket's threshold, f(t) or residual norm, thinned, without gaps."""
    points: list[tuple[int, Any]]
    if name != "residual":
        points = [(line["step"], line[name][bucket]) for line in plan.steps]
    else:
        points = [(r["step"], r["norm"]) for r in plan.residuals if r["bucket"] == bucket]
    points = points[:: 1 + len(points) // MOST_POINTS]
    known = [(step, value) for step, value in points if value]
    return [step for step, _ in known], [value for _, value in known]


def rank_means(recording: Recording, name: str) -> Floats:
    """Mean seconds of a phase between comparisons, one entry per rank."""
    every = np.array([line[name] for line in recording.ranks], dtype=np.float64)
    return np.asarray(every.mean(axis=0), dtype=np.float64)


def slowest_rank(recording: Recording) -> int:
    """The rank that the others wait for: it spends the least time in the exchange itself."""
    return int(np.argmin(rank_means(recording, "exchange_s")))
