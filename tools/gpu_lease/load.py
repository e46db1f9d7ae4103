"""The look-back under load, at its largest size, and what waits on the training thread."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.methods import METHODS
from hvd_sparse.ops import Accumulation, reference
from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tools.gpu_lease.cases import same
from tools.gpu_lease.results import Results

NUMEL, PASSES, LANES, THRESHOLD = 2**24, 1000, 3, 4.0
LARGEST = 2**31 - 1
SIDE = 4096


def run(results: Results) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ops = CudaOps(CupyLauncher(device))
    with results.guarded("lanes beside products"):
        wrong = passes_that_differ(ops, device)
        results.row("lanes beside products", ok=not wrong, passes=PASSES, wrong=wrong)
    with results.guarded("2^31 - 1 elements"):
        error = largest(ops, device)
        results.row("2^31 - 1 elements", {"error": error} if error else {}, ok=not error)
    with results.guarded("waits on the training thread"):
        [waits] = run_ranks(1, waits_of_training, limit_s=60.0)
        results.row("waits on the training thread", ok=not waits, waits=waits)


def passes_that_differ(ops: CudaOps, device: torch.device) -> int:
    """How many selections on busy lanes give other bits than the reference."""
    residual, gradient = torch.randn(2, NUMEL, device=device)
    state = residual.clone()
    expected = (*reference.accumulate_select(Accumulation(state, [gradient]), THRESHOLD), state)
    is_over = threading.Event()

    def lane(number: int) -> int:
        wrong = 0
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            for _ in range(number, PASSES, LANES):
                own = residual.clone()
                found = (*ops.accumulate_select(Accumulation(own, [gradient]), THRESHOLD), own)
                wrong += bool(same(found, expected))
        return wrong

    def products() -> None:
        a = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
        while not is_over.is_set():
            for _ in range(20):
                torch.mm(a, a)
            torch.cuda.current_stream(device).synchronize()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(LANES + 1) as pool:
        beside = pool.submit(products)
        try:
            return sum(pool.map(lane, range(LANES)))
        finally:
            is_over.set()
            beside.result()


def largest(ops: CudaOps, device: torch.device) -> str:
    """In what a selection from the longest vector differs from what was put there."""
    gradient = torch.zeros(LARGEST, dtype=torch.bfloat16, device=device)
    places = torch.arange(0, LARGEST, 999_983, device=device)
    places[-1] = LARGEST - 1
    gradient[places] = 3.0
    residual = torch.zeros(LARGEST, device=device)
    found = ops.accumulate_select(Accumulation(residual, [gradient]), 2.0)
    told = same(found, (places.int(), torch.full((places.numel(),), 3.0, device=device)))
    return told or ("" if not bool(residual.any()) else "the residual is not zero")


def waits_of_training(transport: Transport) -> list[str]:
    """Where the thread that trains waits for the device, after two steps."""
    engine, seen = Engine(METHODS["oktopk"](density=0.001).make()), list[str]()
    engine.connect(transport)
    training, spec = threading.current_thread(), TensorSpec("w", (NUMEL,), "torch.float32")

    def note(message: object, category: object, file: str, line: int, *_: object) -> None:
        is_of_the_mode = "debug mode is a prototype" in str(message)
        if threading.current_thread() is training and not is_of_the_mode:
            seen.append(f"{file}:{line}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        for step in range(5):
            torch.cuda.set_sync_debug_mode("warn" if step >= 2 else "default")
            engine.scale = 1.0
            engine.submit(spec, torch.randn(NUMEL, device="cuda"))
            engine.result("w")
            engine.settle()
        torch.cuda.set_sync_debug_mode("default")
    engine.disconnect()
    return seen
