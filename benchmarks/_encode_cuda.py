"""The encoder's paths on a CUDA device, against a copy's speed and torch's pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks._encode_paths import hashed, torch_nonzero, torch_topk
from benchmarks._timing import GOAL_NUMEL, check, copy_row, goal_row
from benchmarks.report import Row
from hvd_sparse.ops import Accumulation
from hvd_sparse.ops._dispatch import REFERENCE, Ops
from hvd_sparse.ops.cuda import CudaOps, Launcher
from tools.kernels import (
    EventLauncher,
    Job,
    copy_speed,
    hold_device,
    medians_s,
    whole_s,
)

SELECT = "accumulate, select, zero"
HASH = "hash, one slot per bucket, m = 4k"
PUBLISHED = "512 MB encoded by DRAGONN on a V100 (figure 5)"
PUBLISHED_S = 13.2e-3
MOST_S = 0.45e-3
HASH_OVER_SELECT = 1.15


@dataclass(frozen=True)
class Path:
    """An operation with its traffic and goal.

    Attributes:
        metric: Its name.
        run: Performs it.
        element_bytes: Bytes per element that it must read and write.
        least: The goal at `GOAL_NUMEL`, as a share of a copy's speed.
    """

    metric: str
    run: Callable[[Ops, Job], object]
    element_bytes: float
    least: float | None


def paths(job: Job) -> list[Path]:
    half = Accumulation(job.residual, [job.gradient.to(torch.bfloat16)])
    return [
        Path(
            SELECT,
            lambda o, j: o.accumulate_select(j.plain, j.threshold),
            12,
            0.85,
        ),
        Path(
            f"{SELECT}, bfloat16 gradient",
            lambda o, j: o.accumulate_select(half, j.threshold),
            10,
            0.85,
        ),
        Path(
            f"{SELECT}, with momentum",
            lambda o, j: o.accumulate_select(j.corrected, j.corrected_threshold),
            20,
            0.85,
        ),
        Path(
            "accumulate, exact top-k",
            lambda o, j: o.accumulate_topk(j.plain, j.k),
            12,
            0.75,
        ),
        Path(HASH, partial(hashed, slots_per_k=4, slots_per_bucket=1), 12, None),
        Path(
            "hash, eight slots per bucket, m = 2k",
            partial(hashed, slots_per_k=2, slots_per_bucket=8),
            12,
            None,
        ),
    ]


def encode_cuda_rows(job: Job, case: str, launcher: Launcher, repetitions: int) -> list[Row]:
    """Verifies and times every path; returns its rows."""
    events = EventLauncher(launcher)
    timed = CudaOps(events)
    measured: dict[str, Callable[[], float]] = {}
    for path in paths(job):
        job.reset()
        actual = (path.run(timed, job), job.state())
        job.reset()
        check(actual, (path.run(REFERENCE, job), job.state()), path.metric)
        events.spent_s()
        measured[f"{path.metric}, kernels"] = partial(_in_kernels, path, timed, events, job)
    ours = CudaOps(launcher)
    select, topk = paths(job)[0], paths(job)[3]
    for name, run in (
        ("select", partial(select.run, ours, job)),
        ("topk", partial(topk.run, ours, job)),
        ("torch topk", partial(torch_topk, job)),
        ("torch nonzero", partial(torch_nonzero, job)),
    ):
        measured[name] = partial(whole_s, run)
    t = medians_s(measured, job.reset, repetitions)

    goals = job.numel == GOAL_NUMEL
    copy = copy_speed(job.numel, job.device, repetitions)
    rows = [
        copy_row(
            case,
            path.metric,
            t[f"{path.metric}, kernels"],
            path.element_bytes * job.numel,
            copy,
            path.least if goals else None,
        )
        for path in paths(job)
    ]
    selected_s, hashed_s = t[f"{SELECT}, kernels"], t[f"{HASH}, kernels"]
    hash_least = 1 / HASH_OVER_SELECT if goals else None
    rows += [
        goal_row(case, HASH, hashed_s, f"{SELECT}, in kernels", selected_s, hash_least),
        goal_row(
            case,
            SELECT,
            t["select"],
            "torch add, abs, topk, gather, zero",
            t["torch topk"],
            4 if goals else None,
        ),
        goal_row(
            case,
            SELECT,
            t["select"],
            "torch add, abs, compare, nonzero, gather, zero",
            t["torch nonzero"],
            3 if goals else None,
        ),
        goal_row(
            case,
            topk.metric,
            t["topk"],
            "torch add, abs, topk, gather, zero",
            t["torch topk"],
            None,
        ),
    ]
    if goals:
        rows.append(
            goal_row(case, SELECT, t["select"], PUBLISHED, PUBLISHED_S, PUBLISHED_S / MOST_S)
        )
    return rows


def _in_kernels(path: Path, timed: CudaOps, events: EventLauncher, job: Job) -> float:
    hold_device()
    path.run(timed, job)
    return events.spent_s()
