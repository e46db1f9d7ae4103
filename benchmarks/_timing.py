"""Verifies and times what a benchmark compares."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


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
