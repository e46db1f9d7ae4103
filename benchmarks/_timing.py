"""Checks, timing and rows that the kernel benchmarks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from benchmarks.report import Row

NUMELS = (2**20, 2**24, 2**27)
"""Sizes on a CUDA device."""
GOAL_NUMEL = 2**27


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
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


def copy_row(
    case: str, metric: str, ours_s: float, traffic_bytes: float, copy: float, least: float | None
) -> Row:
    """A row that compares kernels with a copy that moves as many bytes.

    Args:
        case: What was measured on.
        metric: What was measured.
        ours_s: Seconds in kernels.
        traffic_bytes: Bytes that must be read and written.
        copy: Bytes per second that a device-to-device copy reads and writes.
        least: The goal as a share of the copy's speed, if there is one.
    """
    speed = traffic_bytes / ours_s
    return Row(
        case=case,
        metric=f"{metric}, in kernels",
        value=ours_s * 1e3,
        unit="ms",
        baseline=f"copy of {traffic_bytes / 1e6:.1f} MB: {traffic_bytes / copy * 1e3:.3f} ms",
        ratio=speed / copy,
        goal=None if least is None else f"at least {least:g} of the copy's speed",
        met=None if least is None else speed >= least * copy,
    )


def goal_row(
    case: str, metric: str, ours_s: float, baseline: str, baseline_s: float, least: float | None
) -> Row:
    """A row whose goal, if any, is a least ratio of the baseline's time over ours."""
    ratio = baseline_s / ours_s
    return Row(
        case=case,
        metric=metric,
        value=ours_s * 1e3,
        unit="ms",
        baseline=f"{baseline}: {baseline_s * 1e3:.3f} ms",
        ratio=ratio,
        goal=None if least is None else f"at least {least:.3g} times as fast",
        met=None if least is None else ratio >= least,
    )
