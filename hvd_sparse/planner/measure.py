"""Measures a profile: a short sweep that all ranks do together.

Each method runs as the engine runs it, on buckets of random gradients: what is timed is the code
that will train. Sizes grow until the time allowed is used up; how far is for rank 0 to say, so that
all ranks do the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from hvd_sparse.collectives.registry import name_of
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.exchange import decode, reduce, select
from hvd_sparse.engine.plan import Method, TensorSpec
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.planner.clock import clock_of
from hvd_sparse.planner.profile import (
    REFERENCE_NUMEL,
    Line,
    MethodCosts,
    Place,
    Profile,
    fit_line,
)
from hvd_sparse.transports import Transport

LIMIT_S = 3.0
NUMELS = (1 << 12, 1 << 18, 1 << 20, 1 << 22)
LEAST_SIZES = 2
"""Sizes that are always measured: a line needs two points."""
LEAST_GROWTH = 3.0
"""Sizes grow at least until the fixed part is no longer most of the time."""
CPU_DEVICE = torch.device("cpu")
WARMUP_STEPS = 2
TIMED_STEPS = 5
AFTER_WARMUP = 1 << 30
"""A step at which any warm-up of density has ended."""

DenseAllreduce = Callable[[Tensor], object]
"""Horovod's allreduce of a float32 tensor, as all ranks call it; returns when it is done."""


def measure_profile(
    transport: Transport,
    dense_allreduce: DenseAllreduce,
    methods: Mapping[str, Method],
    place: Place,
    limit_s: float = LIMIT_S,
    device: torch.device = CPU_DEVICE,
) -> Profile:
    """Measure dense allreduces and all methods; all ranks call this together.

    Args:
        transport: Carries the sparse exchanges.
        dense_allreduce: What they are compared with.
        methods: What may be chosen, by description.
        place: Where this is.
        limit_s: Seconds that it may take, about.
        device: Where the gradients are.

    Returns:
        What this rank measured; ranks differ, and rank 0's counts.
    """
    share_s = limit_s / (1 + len(methods))
    dense = _sweep(
        transport, lambda numel: _time_dense(transport, dense_allreduce, numel, device), share_s
    )
    costs = {
        name: _method_costs(transport, method, share_s, device) for name, method in methods.items()
    }
    lines = fit_line(list(dense), [seconds["dense"] for seconds in dense.values()])
    return Profile(place, lines, costs)


def measure_encoding(
    transport: Transport, methods: Mapping[str, Method], limit_s: float = LIMIT_S
) -> dict[str, MethodCosts]:
    """Costs of methods alone, without a dense allreduce to compare them with."""
    return {
        name: _method_costs(transport, method, limit_s / len(methods))
        for name, method in methods.items()
    }


def _method_costs(
    transport: Transport, method: Method, share_s: float, device: torch.device = CPU_DEVICE
) -> MethodCosts:
    seconds = _sweep(
        transport, lambda numel: _time_method(transport, method, numel, device), share_s
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
    transport: Transport, time_one: Callable[[int], dict[str, float]], share_s: float
) -> dict[int, dict[str, float]]:
    """Seconds by number of elements, for as many sizes as the time allows."""
    start = perf_counter()
    found: dict[int, dict[str, float]] = {}
    for place, numel in enumerate(NUMELS):
        before = perf_counter()
        found[numel] = time_one(numel)
        now = perf_counter()
        is_last = place + 1 == len(NUMELS)
        growth = 1 if is_last else NUMELS[place + 1] / numel
        fits = now - start + growth * (now - before) <= share_s
        first_s, last_s = (sum(found[n].values()) for n in (NUMELS[0], numel))
        wanted = place + 1 < LEAST_SIZES or last_s < LEAST_GROWTH * first_s
        mine = torch.tensor([wanted or fits], dtype=torch.int64)
        if is_last or not transport.broadcast((mine,), 0, channel="sweep").view(torch.int64).item():
            break
    return found


def _time_dense(
    transport: Transport, dense_allreduce: DenseAllreduce, numel: int, device: torch.device
) -> dict[str, float]:
    gradient, clock = torch.ones(numel, device=device), clock_of(device)
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
    gradient = torch.randn(numel, generator=generator).to(device)
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
    transport.allreduce_sum(torch.zeros(1, dtype=torch.int64), channel="meet")
