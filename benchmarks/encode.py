"""Times the operations on one rank: accumulate, select, merge and decode.

`python -m benchmarks.encode --json FILE`

The residual is that of a running job: a few steps of exact top-k have passed over it. Every result
is compared with the torch reference before anything is timed; then ours and the baselines take
turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._report import Row, write_report
from hvd_sparse import ops
from hvd_sparse.ops import reference

DENSITIES = (1e-3, 1e-2)
WARMUP_STEPS = 4
PIVOT_FACTOR = 0.9
WORLD_SIZE = 8

# At density 1e-3. Factors of the baseline's time over ours.
GOAL_DENSITY = 1e-3
SELECT_OVER_ADD = 1.25
SELECT_SPEEDUP = 8.0
TOPK_SPEEDUP = 20.0


@dataclass(frozen=True)
class Step:
    """One step of a running job.

    Attributes:
        residual: float32 `(n,)`, before the step.
        gradient: float32 `(n,)`.
        k: Entries to select.
        threshold: The k-th magnitude of their sum.
        pivot: The guess at it that the last step's threshold gives.
    """

    residual: Tensor
    gradient: Tensor
    k: int
    threshold: float
    pivot: float


def gradient_like(numel: int, seed: int, device: torch.device) -> Tensor:
    """Normal within a layer, on scales that differ between layers: heavier tails than a normal."""
    generator = torch.Generator(device).manual_seed(seed)
    gradient = torch.randn(numel, generator=generator, device=device)
    layer_numel = max(1, numel // 50)
    for i, layer in enumerate(gradient.split(layer_numel)):
        layer.mul_(0.5 + (i * 7 % 50) / 25)
    return gradient


def running_job(numel: int, density: float, device: torch.device) -> Step:
    k = max(1, round(numel * density))
    residual = torch.zeros(numel, device=device)
    threshold = 0.0
    for seed in range(WARMUP_STEPS):
        gradient = gradient_like(numel, seed, device)
        _, _, threshold = ops.accumulate_topk(residual, [gradient], k)
    gradient = gradient_like(numel, WARMUP_STEPS, device)
    exact = ops.kth_magnitude(residual + gradient, k)
    return Step(residual, gradient, k, exact, PIVOT_FACTOR * threshold)


def torch_topk(residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    residual.add_(step.gradient)
    indices = torch.topk(residual.abs(), step.k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0.0
    return indices, values


def torch_nonzero(residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    residual.add_(step.gradient)
    indices = torch.nonzero(residual.abs() >= step.threshold).view(-1)
    values = residual[indices]
    residual[indices] = 0.0
    return indices, values


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    contenders: dict[str, Callable[[], object]],
    prepare: Callable[[], object],
    repetitions: int,
    device: torch.device,
) -> dict[str, float]:
    """Median seconds of each contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, contender in contenders.items():
            prepare()
            synchronize(device)
            time.sleep(0.005)  # torch's threads spin for a while after their last work
            start = time.perf_counter()
            contender()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def check(actual: object, expected: object, what: str) -> None:
    """Ends the benchmark unless the two are equal."""
    if isinstance(actual, tuple) and isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            check(one, other, what)
        return
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        equal = torch.equal(actual, expected)
    else:
        equal = actual == expected
    if not equal:
        raise SystemExit(f"{what} differs from the reference: nothing was timed")


def verify_accumulate(step: Step) -> None:
    ours, theirs = step.residual.clone(), step.residual.clone()
    expected_topk = reference.accumulate_topk(theirs, [step.gradient], step.k)
    for pivot in (step.pivot, 0.0):
        ours.copy_(step.residual)
        actual_topk = ops.accumulate_topk(ours, [step.gradient], step.k, pivot)
        check((*actual_topk, ours), (*expected_topk, theirs), f"accumulate_topk, pivot {pivot}")
    ours.copy_(step.residual)
    theirs.copy_(step.residual)
    actual = ops.accumulate_select(ours, [step.gradient], step.threshold)
    expected = reference.accumulate_select(theirs, [step.gradient], step.threshold)
    check((*actual, ours), (*expected, theirs), "accumulate_select")


def row(
    case: str, metric: str, ours_s: float, baseline: str, baseline_s: float, goal: float | None
) -> Row:
    """A row whose goal, if any, is a least ratio."""
    ratio = baseline_s / ours_s
    return Row(
        case=case,
        metric=metric,
        value=ours_s * 1e3,
        unit="ms",
        baseline=f"{baseline}: {baseline_s * 1e3:.2f} ms",
        ratio=ratio,
        goal=None if goal is None else f"at least {goal:g} times as fast",
        met=None if goal is None else ratio >= goal,
    )


def accumulate_rows(step: Step, case: str, goals: bool, repetitions: int) -> list[Row]:
    verify_accumulate(step)
    residual, gradients = step.residual.clone(), [step.gradient]
    t = take_turns(
        {
            "add": lambda: residual.add_(step.gradient),
            "select": lambda: ops.accumulate_select(residual, gradients, step.threshold),
            "topk": lambda: ops.accumulate_topk(residual, gradients, step.k, step.pivot),
            "topk unguided": lambda: ops.accumulate_topk(residual, gradients, step.k),
            "torch topk": lambda: torch_topk(residual, step),
            "torch nonzero": lambda: torch_nonzero(residual, step),
        },
        lambda: residual.copy_(step.residual),
        repetitions,
        step.residual.device,
    )
    faster = min("torch topk", "torch nonzero", key=lambda name: t[name])
    rows = [
        Row(
            case=case,
            metric="accumulate, select, zero",
            value=t["select"] * 1e3,
            unit="ms",
            baseline=f"r.add_(g): {t['add'] * 1e3:.2f} ms",
            ratio=t["add"] / t["select"],
            goal=f"at most {SELECT_OVER_ADD:g} times r.add_(g)" if goals else None,
            met=t["select"] <= SELECT_OVER_ADD * t["add"] if goals else None,
        )
    ]
    for name, pipeline in (
        ("torch topk", "torch add, abs, topk, gather, zero"),
        ("torch nonzero", "torch add, abs, compare, nonzero, gather, zero"),
    ):
        goal = SELECT_SPEEDUP if goals and name == faster else None
        rows.append(row(case, "accumulate, select, zero", t["select"], pipeline, t[name], goal))
    baseline = "torch add, abs, topk, gather, zero"
    for name, metric in (
        ("topk", "accumulate, exact top-k"),
        ("topk unguided", "accumulate, exact top-k, no pivot"),
    ):
        goal = TOPK_SPEEDUP if goals and name == "topk" else None
        rows.append(row(case, metric, t[name], baseline, t["torch topk"], goal))
    return rows


def stream_rows(
    numel: int, density: float, case: str, repetitions: int, device: torch.device
) -> list[Row]:
    """Merging the streams of several ranks, and decoding what comes of it."""
    streams = []
    for rank in range(WORLD_SIZE):
        x = gradient_like(numel, 100 + rank, device)
        threshold = ops.kth_magnitude(x, max(1, round(numel * density)))
        streams.append(ops.accumulate_select(x, [], threshold))
    merged = ops.merge_sum(streams, numel)
    check(merged, reference.merge_sum(streams, numel), "merge_sum")
    ours, theirs = torch.empty(numel, device=device), torch.empty(numel, device=device)
    ops.decode(ours, *merged)
    reference.decode(theirs, *merged)
    check(ours, theirs, "decode")

    # torch wants long indices, and is given them for nothing.
    all_indices = torch.cat([indices for indices, _ in streams]).long().view(1, -1)
    all_values = torch.cat([values for _, values in streams])
    merged_indices, merged_values = merged[0].long(), merged[1]

    def torch_merge() -> Tensor:
        return torch.sparse_coo_tensor(
            all_indices, all_values, (numel,), check_invariants=False
        ).coalesce()

    t = take_turns(
        {
            "merge": lambda: ops.merge_sum(streams, numel),
            "torch merge": torch_merge,
            "decode": lambda: ops.decode(ours, *merged),
            "torch decode": lambda: theirs.zero_().scatter_(0, merged_indices, merged_values),
        },
        lambda: None,
        repetitions,
        device,
    )
    return [
        row(
            case,
            f"merge of {WORLD_SIZE} streams",
            t["merge"],
            "torch coalesce",
            t["torch merge"],
            None,
        ),
        row(
            case,
            f"decode of {WORLD_SIZE} merged streams",
            t["decode"],
            "torch zero_, scatter_",
            t["torch decode"],
            None,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()

    device = torch.device(options.device)
    rows = []
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for density in DENSITIES:
            case = f"n={options.numel} density={density:g} threads={threads} {device.type}"
            step = running_job(options.numel, density, device)
            goals = density == GOAL_DENSITY and device.type == "cpu"
            rows += accumulate_rows(step, case, goals, options.repetitions)
            rows += stream_rows(options.numel, density, case, options.repetitions, device)
    write_report("encode", rows, options.json)


if __name__ == "__main__":
    main()
