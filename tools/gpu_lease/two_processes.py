"""Two processes on one device that train under AMP by DistributedDataParallel, without Horovod."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_sparse
from tools.gpu_lease.results import Results

COMPRESSORS = (
    *("none", "topk", "oktopk", "dgc", "dragonn", "exdyna", "clt_k", "gaussiank", "sidco"),
    *("mstopk", "randomk", "sparse_adamw"),
)
WIDTH, STEPS = 1024, 40


def run(results: Results, device: str = "cuda", compressors: Sequence[str] = COMPRESSORS) -> None:
    """Launch them once; rank 0 writes a row for each compressor, and one without."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    module = ["-m", "tools.gpu_lease.two_processes", str(results.folder), device, *compressors]
    done = subprocess.run([*launch, *module], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        results.row("two processes", ok=False, error=(done.stdout + done.stderr)[-6000:])


def train(compressor: str, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step, the losses, and what rank 0 sent; raises where ranks differ."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = None
    if compressor == "sparse_adamw":
        named = model.module.named_parameters()
        optimizer, compression = hvd_sparse.sparse_adamw(named, lr=1e-3, density=0.05)
    elif compressor != "none":
        compression = getattr(hvd_sparse.Compression, compressor)(density=0.05)
    if compression is not None:
        hvd_sparse.ddp.register(model, compression)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    target = torch.randn(64, 64, device=device)
    torch.manual_seed(1 + dist.get_rank())
    losses, times_s = [], []
    for _ in range(STEPS):
        started_s = time.perf_counter()
        x = torch.randn(256, 64, device=device)
        with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
            loss = (model(x) - x @ target / 8).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        times_s.append(time.perf_counter() - started_s)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    theirs = weights.clone()
    dist.broadcast(theirs, src=0)
    if not torch.equal(theirs, weights):
        raise RuntimeError(f"{compressor}: rank {dist.get_rank()} has other weights than rank 0")
    if not losses[-1] < 0.9 * losses[0]:
        raise RuntimeError(f"{compressor}: the loss went from {losses[0]:g} to {losses[-1]:g}")
    row = {"step_ms": statistics.median(times_s[10:]) * 1e3, "first": losses[0], "last": losses[-1]}
    if compression is not None:
        row["bytes_sent"] = compression.stats().totals.bytes_sent
        compression.close()
    return row


def main() -> None:
    """One of the two."""
    dist.init_process_group("gloo")  # NCCL takes no two ranks on a device
    results = Results(Path(sys.argv[1]), "two_processes")
    for compressor in sys.argv[3:]:
        row = train(compressor, torch.device(sys.argv[2]))
        if dist.get_rank() == 0:
            results.row(compressor, row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
