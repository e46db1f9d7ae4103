"""Time on the device where gradients are: when something is ready there, not when it was issued."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Clock:
    """Of a CPU, which has done what a call returns from."""

    def mark(self) -> Any:
        """This moment; waits for nothing."""
        return perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """From one mark to another."""
        return float(stop - start)

    def wait(self) -> None:
        """Return when all that was issued is done."""


class CudaClock(Clock):
    """Of a CUDA device: a mark is an event in the stream that is current.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """See `Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """See `Clock.seconds`; waits for both."""
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def wait(self) -> None:
        """See `Clock.wait`."""
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
