"""What an operation costs the host, by the number of tensors that a bucket has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hvd_sparse.ops import Accumulation
from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from hvd_sparse.ops.cuda._passes import AccumulationInputs
from hvd_sparse.ops.cuda._workspace import Workspace
from tools.gpu_lease.cases import HASH_SEED
from tools.gpu_lease.results import Results

NUMEL = 2**23
TENSORS = (1, 60, 160)
CALLS = 40


def run(results: Results) -> None:
    """Two times for each: until the call returns, and until the device is done."""
    device = torch.device("cuda", torch.cuda.current_device())
    ops = CudaOps(CupyLauncher(device))
    for count in TENSORS:
        gradients = list(torch.randn(NUMEL, device=device).split(-(-NUMEL // count)))
        accumulation = Accumulation(torch.randn(NUMEL, device=device), gradients)
        for name, call in calls_of(ops, accumulation).items():
            with results.guarded(f"{name}, {count} tensors"):
                returned_s, done_s = timed(call)
                results.row(
                    f"{name}, {count} tensors", host_us=returned_s * 1e6, whole_us=done_s * 1e6
                )


def calls_of(ops: CudaOps, accumulation: Accumulation) -> dict[str, Callable[[], object]]:
    """By name."""
    k = accumulation.numel // 1000
    return {
        "table that is kept": lambda: AccumulationInputs(accumulation, ops._workspace),
        "table made anew": lambda: AccumulationInputs(accumulation, Workspace()),
        "accumulate_select": lambda: ops.accumulate_select(accumulation, 8.0),
        "accumulate_topk": lambda: ops.accumulate_topk(accumulation, k),
        "hash_select": lambda: ops.hash_select(accumulation, 8.0, 4 * k, 1, HASH_SEED),
        "sample": lambda: ops.sample_accumulator(accumulation, accumulation.numel // 997, 8, 7),
    }


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Median seconds until a call returns, and until its work is done, on an idle device."""
    returned, done = [], []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        call()
        returned.append(time.perf_counter() - started_s)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - started_s)
    return statistics.median(returned[5:]), statistics.median(done[5:])
