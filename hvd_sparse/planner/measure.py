"""Measures a profile: a short sweep that all ranks run together.

Each method runs as the engine runs it, on buckets of random gradients, so the code that is timed is
the code that will train. Sizes grow until the allowed time is used up. Rank 0 decides how far, so
that all ranks make the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.collectives.registry import name_of
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.bucketing import Method, MethodId, TensorSpec
from hvd_sparse.engine.exchange import decode, reduce, select
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.planner.costs import REFERENCE_NUMEL, Line, MethodCosts, Place, Profile, fit_line
from hvd_sparse.streams import CPU
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json

LIMIT_S = 3.0
NUMELS = (1 << 12, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
LEAST_SIZES = 2
"""Sizes that are always measured: a line needs two points."""
LEAST_GROWTH = 3.0
"""Sizes grow at least until the fixed part is no longer most of the time."""
WARMUP_STEPS = 3
TIMED_STEPS = 5
AFTER_WARMUP = 1 << 30
"""A step at which any warm-up of density has ended."""

DenseAllreduce = Callable[[Tensor], object]
"""Horovod's allreduce of a float32 tensor, as all ranks call it; returns when it is done."""


def measure_profile(
    transport: Transport,
    dense_allreduce: DenseAllreduce,
    methods: Mapping[MethodId, Method],
    place: Place,
    limit_s: float = LIMIT_S,
    device: torch.device = CPU,
    most_numel: int = NUMELS[-1],
) -> Profile:
    """Measure dense allreduces and all methods; all ranks call this together.

    Args:
        transport: Carries the sparse exchanges.
        dense_allreduce: What they are compared with.
        methods: The methods to choose from.
        place: Where this is.
        limit_s: Seconds that it may take, about.
        device: Where the gradients are.
        most_numel: Elements of the largest vector to measure: those of the model.

    Returns:
        What this rank measured. Ranks differ; the planner goes by rank 0's.
    """
    numels, ends_at = _up_to(most_numel), perf_counter() + limit_s
    costs = {}
    for done, (name, method) in enumerate(methods.items()):
        share_s = (ends_at - perf_counter()) / (1 + len(methods) - done)
        costs[name] = measure_method(transport, method, numels, share_s, device)
    dense = _sweep(
        *(transport, lambda numel: _time_dense(transport, dense_allreduce, numel, device)),
        *(numels, ends_at - perf_counter()),
    )
    lines = fit_line(list(dense), [seconds["dense"] for seconds in dense.values()])
    return Profile(place, lines, costs)


def _up_to(most_numel: int) -> list[int]:
    """The sizes to measure for vectors of at most so many elements."""
    most = min(max(most_numel, NUMELS[LEAST_SIZES - 1]), NUMELS[-1])
    return [*(numel for numel in NUMELS if numel < most), most]


def measure_method(
    transport: Transport,
    method: Method,
    numels: Sequence[int],
    share_s: float,
    device: torch.device = CPU,
) -> MethodCosts:
    """The costs of one method, measured in about `share_s` seconds."""
    seconds = _sweep(
        transport, lambda numel: _time_method(transport, method, numel, device), numels, share_s
    )

    def line(phase: str) -> Line:
        return fit_line(list(seconds), [max(1e-9, s[phase]) for s in seconds.values()])

    made = method.collective(transport, REFERENCE_NUMEL, method.k(REFERENCE_NUMEL))
    return MethodCosts(
        name_of(made),
        method.density,
        encode=line("encode"),
        exchange=line("exchange"),
        decode=line("decode"),
        wire=made.wire.expected_bytes(made.numel, made.k),
    )


def _sweep(
    transport: Transport,
    time_one: Callable[[int], dict[str, float]],
    numels: Sequence[int],
    share_s: float,
) -> dict[int, dict[str, float]]:
    """Seconds by number of elements, up to the largest size that the time allows."""
    start = perf_counter()
    found: dict[int, dict[str, float]] = {}
    walls: list[float] = []
    numel = numels[0]
    while numel:
        before = perf_counter()
        found[numel] = time_one(numel)
        now = perf_counter()
        walls.append(now - before)
        larger = [each for each in numels if each > numel]
        wanted = _next(larger, found, walls, share_s - (now - start))
        numel = gather_json(transport, wanted, "sweep")[0]
    return found


def _next(
    larger: Sequence[int],
    found: Mapping[int, dict[str, float]],
    walls: Sequence[float],
    left_s: float,
) -> int:
    """The size to measure next, or 0 at the end: the largest one that fits into the time left.

    Costs of vectors larger than any measured one are extrapolated, and noise with them. `walls` has
    how long measuring took, size by size.
    """
    if not larger:
        return 0
    if len(found) < LEAST_SIZES:
        return larger[0]
    wall = fit_line(list(found), walls)
    fitting = [numel for numel in larger if wall.at(numel) <= left_s]
    if fitting:
        return fitting[-1]
    first_s, *_, last_s = (sum(seconds.values()) for seconds in found.values())
    return larger[0] if last_s < LEAST_GROWTH * first_s else 0


def _time_dense(
    transport: Transport, dense_allreduce: DenseAllreduce, numel: int, device: torch.device
) -> dict[str, float]:
    gradient, clock = torch.ones(numel, device=device, dtype=torch.float32), clock_of(device)
    seconds = []
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        clock.wait()
        _meet(transport)
        start = perf_counter()
        dense_allreduce(gradient)
        clock.wait()
        if step >= WARMUP_STEPS:
            seconds.append(perf_counter() - start)
    return {"dense": median(seconds)}


def _time_method(
    transport: Transport, method: Method, numel: int, device: torch.device
) -> dict[str, float]:
    """The median seconds of each phase; each ends when the device has done it."""
    generator = torch.Generator().manual_seed(transport.rank)
    gradient = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu").to(device)
    spec = TensorSpec("profile", (numel,), "torch.float32")
    bucket = Bucket((spec,), method, transport, device, step=AFTER_WARMUP)
    clock = clock_of(device)
    steps: list[dict[str, float]] = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        bucket.put(0, gradient)
        bucket.step_stats = StepStats()
        clock.wait()
        _meet(transport)
        took = {}
        with bucket.lane.work():
            for phase, work in (
                ("encode", select),
                ("exchange", reduce),
                ("decode", lambda b: decode(b, 1.0, b.step_stats)),
            ):
                start = perf_counter()
                work(bucket)
                clock.wait()
                took[phase] = perf_counter() - start
        bucket.lane.hand_back()
        bucket.close_step()
        steps.append(took)
    return {phase: median(took[phase] for took in steps[WARMUP_STEPS:]) for phase in steps[0]}


def _meet(transport: Transport) -> None:
    """Ranks begin together, so that none is timed while it waits for another."""
    transport.allreduce_sum(torch.zeros(1, dtype=torch.int64, device="cpu"), channel="meet")


class DeviceClock:
    """Tells when work on a device is done. This one is for CPUs: work is done on return."""

    def mark(self) -> Any:
        """This moment; does not wait."""
        return perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """From one mark to another."""
        return float(stop - start)

    def wait(self) -> None:
        """Return when all issued work is done."""


class CudaClock(DeviceClock):
    """The clock of a CUDA device: a mark is an event in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @override
    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def seconds(self, start: Any, stop: Any) -> float:
        start.synchronize()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    @override
    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else DeviceClock()
