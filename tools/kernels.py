"""Shared by benchmarks and tools that time kernels: the state of a job, and CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.ops import Accumulation, Before, Momentum, reference
from hvd_sparse.ops.cuda import Argument, Launcher

WARMUP_RUNS = 2
QUEUED_CYCLES = 4_000_000
"""The device sleeps about 2 ms before a measurement, and the host launches meanwhile, so that no
launch is counted."""
Event = torch.cuda.Event
WARMUP_STEPS = 4
MOMENTUM = 0.9
GROUP_NUMEL = 512
HASH_SEED = 0x9E3779B97F4A7C15


class EventLauncher:
    """Puts an event before and after each kernel of another launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._spans: list[tuple[Event, Event]] = []

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
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
    """Keeps the device busy until the host has launched the measured kernels."""
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUED_CYCLES)


def whole_s(run: Callable[[], object]) -> float:
    """Device seconds from the first to the last kernel of a call, including the host's waits."""
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
    """Median of each measurement; they take turns, after some warm-up runs."""
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(WARMUP_RUNS + repetitions):
        for name, measure in measured.items():
            prepare()
            seconds[name].append(measure())
    return {name: statistics.median(times[WARMUP_RUNS:]) for name, times in seconds.items()}


def copy_speed(numel: int, device: torch.device, repetitions: int) -> float:
    """Bytes per second, read and written, of a device-to-device copy of `numel` floats."""
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    spent = medians_s(
        {"copy": lambda: whole_s(lambda: target.copy_(source))}, lambda: None, repetitions
    )
    return 8 * numel / spent["copy"]


def gradient_like(numel: int, seed: int, device: torch.device) -> Tensor:
    """Normal values with a scale per layer: heavier tails than a normal distribution."""
    generator = torch.Generator(device).manual_seed(seed)
    gradient = torch.randn(numel, generator=generator, device=device)
    layer_numel = max(1, numel // 50)
    for i, layer in enumerate(gradient.split(layer_numel)):
        layer.mul_(0.5 + (i * 7 % 50) / 25)
    return gradient


class Job:
    """The state of one rank before a step, and the operations' arguments made from it.

    A few steps of exact top-k have passed over the residual, and of DGC over the velocity and its
    momentum buffer.

    Attributes:
        gradient: float32 `(n,)`.
        k: Entries to select.
        residual: Working copy, float32 `(n,)`; `reset` restores it.
        threshold: The k-th magnitude of residual + gradient.
        velocity: Working copy of DGC's v.
        buffer: Working copy of DGC's u.
        corrected_threshold: The k-th magnitude of the new v.
        plain: Accumulation of the gradient into the residual.
        apart: Accumulation of residual and gradient into another tensor.
        corrected: Accumulation of the gradient into the velocity.
        nesterov: The same with Nesterov's momentum.
    """

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.k = max(1, round(numel * density))
        self.numel = numel
        self.device = device
        self._residual = torch.zeros(numel, device=device)
        self._velocity = torch.zeros(numel, device=device)
        self._buffer = torch.zeros(numel, device=device)
        for seed in range(WARMUP_STEPS):
            g = gradient_like(numel, seed, device)
            ops.accumulate_topk(Accumulation(self._residual, [g]), self.k)
            corrected = Accumulation(self._velocity, [g], Momentum(self._buffer, MOMENTUM))
            indices, _, _ = ops.accumulate_topk(corrected, self.k)
            ops.on(indices.device).take_at(self._buffer, indices)
        self.gradient = gradient_like(numel, WARMUP_STEPS, device)
        self.threshold = reference.kth_magnitude(self._residual + self.gradient, self.k)
        sums = self._buffer * MOMENTUM + self.gradient + self._velocity
        self.corrected_threshold = reference.kth_magnitude(sums, self.k)
        self.residual = self._residual.clone()
        self.velocity = self._velocity.clone()
        self.buffer = self._buffer.clone()
        self.plain = Accumulation(self.residual, [self.gradient])
        self._after = torch.zeros_like(self.residual)
        self.apart = Accumulation(self._after, [self.gradient], before=Before(self.residual))
        self.corrected = self._corrected(Momentum(self.buffer, MOMENTUM))
        self.nesterov = self._corrected(Momentum(self.buffer, MOMENTUM, nesterov=True))
        # A selection's indices, as int32 for us and as int64 for torch.
        self.indices = ops.accumulate_select(Accumulation(sums), self.threshold)[0]
        self.long_indices = self.indices.long()
        self.group_k = max(1, round(GROUP_NUMEL * density))
        self.partition = (numel // 4, numel // 2)

    def _corrected(self, momentum: Momentum) -> Accumulation:
        return Accumulation(self.velocity, [self.gradient], momentum)

    def reset(self) -> None:
        """Restores the state before the step."""
        self.residual.copy_(self._residual)
        self.velocity.copy_(self._velocity)
        self.buffer.copy_(self._buffer)
        self._after.zero_()

    def state(self) -> tuple[Tensor, ...]:
        kept = self.residual, self.velocity, self.buffer, self._after
        return tuple(tensor.clone() for tensor in kept)
