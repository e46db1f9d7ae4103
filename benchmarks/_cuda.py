"""Times kernels on a CUDA device: by events, and against the device's own copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from benchmarks._report import Row
from hvd_sparse.ops.cuda import Argument, Launcher

NUMELS = (2**20, 2**24, 2**27)
GOAL_NUMEL = 2**27
WARMUP_RUNS = 2
QUEUED_CYCLES = 400_000
"""What the device sleeps before a measurement, about 0.2 ms: the host launches meanwhile, so that
no launch is counted."""
Event = torch.cuda.Event


class EventLauncher:
    """Puts an event before and after each kernel of another launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._spans: list[tuple[Event, Event]] = []

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        """See `Launcher.launch`."""
        start, stop = Event(enable_timing=True), Event(enable_timing=True)
        start.record()
        self._launcher.launch(kernel, blocks, *arguments)
        stop.record()
        self._spans.append((start, stop))

    def spent_s(self) -> float:
        """Seconds in kernels since the last call."""
        torch.cuda.synchronize()
        total_ms: float = sum(start.elapsed_time(stop) for start, stop in self._spans)
        self._spans.clear()
        return total_ms / 1e3


def hold_device() -> None:
    """Keeps the device busy while the host launches what is measured."""
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUED_CYCLES)


def whole_s(run: Callable[[], object]) -> float:
    """Seconds from the first to the last work that a call issues, the host's waits included."""
    start, stop = Event(enable_timing=True), Event(enable_timing=True)
    hold_device()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def medians_s(
    measured: Mapping[str, Callable[[], float]], prepare: Callable[[], object], repetitions: int
) -> dict[str, float]:
    """Median of each measurement; they take turns, after some runs that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(WARMUP_RUNS + repetitions):
        for name, measure in measured.items():
            prepare()
            seconds[name].append(measure())
    return {name: statistics.median(times[WARMUP_RUNS:]) for name, times in seconds.items()}


def copy_row(
    case: str, metric: str, ours_s: float, traffic_bytes: float, copy: float, least: float | None
) -> Row:
    """A row that holds kernels against a copy that moves as many bytes.

    Args:
        case: What was measured on.
        metric: What was measured.
        ours_s: Seconds in kernels.
        traffic_bytes: Bytes that have to be read and written.
        copy: Bytes per second that a device-to-device copy reads and writes.
        least: Share of the copy's speed that is the goal, if there is one.
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


def copy_speed(numel: int, device: torch.device, repetitions: int) -> float:
    """Bytes per second, read and written, of a device-to-device copy of `numel` floats."""
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    spent = medians_s(
        {"copy": lambda: whole_s(lambda: target.copy_(source))}, lambda: None, repetitions
    )
    return 8 * numel / spent["copy"]
