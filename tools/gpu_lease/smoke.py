"""Every kernel once, against the reference on the same device."""

from __future__ import annotations

import sys
from collections import Counter

import torch

from hvd_sparse.ops._dispatch import REFERENCE
from hvd_sparse.ops.cuda import Argument, CudaOps, CupyLauncher, Launcher, _sources
from tools.gpu_lease.cases import NUMELS, cases, same
from tools.gpu_lease.results import Results


class CountingLauncher:
    """Counts what another launcher starts."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.launched: Counter[str] = Counter()

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        self.launched[kernel] += 1
        self._launcher.launch(kernel, blocks, *arguments)


def run(results: Results) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compare(results, CupyLauncher(device), device)


def compare(
    results: Results, launcher: Launcher, device: torch.device, numels: tuple[int, ...] = NUMELS
) -> None:
    """A row for each operation, and one of the kernels that none of them launched."""
    counting = CountingLauncher(launcher)
    ops = CudaOps(counting)
    for numel in numels:
        for name, case in cases(numel, device):
            with results.guarded(f"{name}, n = {numel}"):
                told = same(case(ops), case(REFERENCE))
                error = {"error": told} if told else {}
                results.row(f"{name}, n = {numel}", error, ok=not told)
    idle = sorted(_sources.kernels().keys() - counting.launched.keys())
    results.row("kernels launched", ok=not idle, launched=len(counting.launched), idle=idle)


if __name__ == "__main__":  # for tools that watch kernels: no rows, one call of each
    place = torch.device("cuda", torch.cuda.current_device())
    started = CudaOps(CupyLauncher(place))
    for _, one in cases(int(sys.argv[1]) if len(sys.argv) > 1 else NUMELS[-2], place):
        one(started)
    torch.cuda.synchronize()
