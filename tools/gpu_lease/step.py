"""A whole step of the engine beside matrix products, as in a backward pass: what is hidden."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tools.gpu_lease.results import Results

NUMEL, TENSORS, DENSITY = 2**25, 24, 0.001
SIDE, STEPS = 4096, 12


def run(results: Results) -> None:
    """For each method: products alone, the step alone, and both at once; ranks are threads."""
    for ranks in (2, 3):
        for name in ("oktopk", "topk", "dgc", "dragonn"):
            told = f"{name}, {ranks} ranks"
            with results.guarded(told):
                row, *_ = run_ranks(ranks, partial(measured, name=name), limit_s=60.0)
                results.row(told, row)


def measured(transport: Transport, name: str) -> dict[str, float]:
    """Milliseconds, and the share of the step that the products hide."""
    engine = Engine(METHODS[name](density=DENSITY).make())
    engine.connect(transport)
    gradients = [torch.randn(NUMEL // TENSORS, device="cuda") for _ in range(TENSORS)]
    specs = [TensorSpec(f"t{i}", tuple(g.shape), str(g.dtype)) for i, g in enumerate(gradients)]
    a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def products(submit: bool) -> None:
        for spec, gradient in zip(specs, gradients, strict=True):
            torch.mm(a, a)
            if submit:
                engine.submit(spec, gradient)

    def finish() -> None:
        engine.scale = 1.0
        for spec in specs:
            engine.result(spec.name)
        engine.settle()

    def step(compute: bool) -> None:
        if compute:
            products(submit=True)
        else:
            for spec, gradient in zip(specs, gradients, strict=True):
                engine.submit(spec, gradient)
        finish()

    compute_s = median_s(lambda: products(submit=False))
    alone_s, both_s = median_s(lambda: step(False)), median_s(lambda: step(True))
    engine.disconnect()
    return {
        "products_ms": compute_s * 1e3,
        "step_ms": alone_s * 1e3,
        "both_ms": both_s * 1e3,
        "hidden_share": (compute_s + alone_s - both_s) / alone_s,
    }


def median_s(call: Callable[[], object]) -> float:
    """Seconds until the device is done; the first calls compile and plan."""
    times_s = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s[4:])
