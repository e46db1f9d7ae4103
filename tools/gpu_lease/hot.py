"""The hot kernels once each, for tools that watch them."""

from __future__ import annotations

import sys

import torch

from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from tools.kernels import HASH_SEED, Job

NUMEL, DENSITY = 2**26, 0.001


def main(numel: int) -> None:
    """Calls that launch them, on the state of a running job."""
    device = torch.device("cuda", torch.cuda.current_device())
    job, ops = Job(numel, DENSITY, device), CudaOps(CupyLauncher(device))
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("hot")
    ops.accumulate_select(job.plain, job.threshold)
    ops.accumulate_select(job.corrected, job.corrected_threshold)
    ops.hash_select(job.plain, job.threshold, 4 * job.k, 1, HASH_SEED)
    ops.accumulate_topk(job.plain, job.k)
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else NUMEL)
