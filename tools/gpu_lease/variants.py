"""Variants of the hot kernels side by side: registers a thread has, and where segments begin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from hvd_sparse.ops import Accumulation, Momentum
from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from tools.gpu_lease.results import Results
from tools.kernels import HASH_SEED, EventLauncher, hold_device, medians_s

NUMEL = 2**26
BLOCKS_PER_PROCESSOR = (2, 3, 4, 5)
"""At least; csrc/cuda/common.cuh compiles the kernels of accumulate.cu for 4."""
THRESHOLD = 4.65
"""One entry in a thousand reaches it."""
SLOTS = NUMEL // 250
REPETITIONS = 9
LAYOUTS: dict[str, list[int]] = {
    "whole": [],
    "odd tensor last": [NUMEL - 7],
    "odd tensor first": [7],
}
"""Where the gradient is cut in two."""


def run(results: Results) -> None:
    """Microseconds in kernels, a row for each variant."""
    device = torch.device("cuda", torch.cuda.current_device())
    for blocks in BLOCKS_PER_PROCESSOR:
        options = (f"-DBLOCKS_PER_PROCESSOR={blocks}",)
        launcher = EventLauncher(CupyLauncher(device, options))
        for dtype in (torch.float32, torch.bfloat16):
            told = f"{blocks} blocks a processor, {str(dtype).removeprefix('torch.')}"
            with results.guarded(told):
                results.row(told, measured(launcher, [randn(NUMEL, device).to(dtype)]))
    launcher = EventLauncher(CupyLauncher(device))
    for name, cuts in LAYOUTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            told = f"{name}, {str(dtype).removeprefix('torch.')}"
            with results.guarded(told):
                bounds = pairwise([0, *cuts, NUMEL])
                pieces = [randn(stop - start, device).to(dtype) for start, stop in bounds]
                results.row(told, measured(launcher, pieces))


def randn(numel: int, device: torch.device) -> Tensor:
    return torch.randn(numel, device=device)


def measured(launcher: EventLauncher, gradients: list[Tensor]) -> dict[str, float]:
    """Microseconds in kernels of selection without and with momentum, and of hashing."""
    ops, device = CudaOps(launcher), gradients[0].device
    residual, buffer = (torch.empty(NUMEL, device=device) for _ in range(2))
    plain = Accumulation(residual, gradients)
    corrected = Accumulation(residual, gradients, Momentum(buffer, 0.9))
    calls: dict[str, Callable[[], object]] = {
        "select_us": lambda: ops.accumulate_select(plain, THRESHOLD),
        "momentum_us": lambda: ops.accumulate_select(corrected, THRESHOLD),
        "hash_us": lambda: ops.hash_select(plain, THRESHOLD, SLOTS, 1, HASH_SEED),
    }

    def timed(call: Callable[[], object]) -> float:
        hold_device()
        call()
        return launcher.spent_s()

    def prepare() -> None:
        residual.normal_()
        buffer.zero_()

    medians = medians_s(
        {name: partial(timed, call) for name, call in calls.items()}, prepare, REPETITIONS
    )
    return {name: seconds * 1e6 for name, seconds in medians.items()}
