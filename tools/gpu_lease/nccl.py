"""One process's messages to itself over NCCL, by size: from the host, and without it."""

from __future__ import annotations

import statistics
import time

import torch

from hvd_sparse.collectives.topk_allgather import HEADER_BYTES
from hvd_sparse.transports.meeting import serve_store
from hvd_sparse.transports.nccl import DeviceGroup, connect_nccl
from tools.gpu_lease.results import Results

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
TIMEOUT_S = 30.0


def run(results: Results) -> None:
    """Connecting, which sets the pair up, and then each size."""
    device = torch.device("cuda", torch.cuda.current_device())
    started_s = time.perf_counter()
    store, _ = serve_store("127.0.0.1", TIMEOUT_S)
    group = DeviceGroup(connect_nccl(store, 0, 1, device), 1, device)
    results.row("connect", seconds=time.perf_counter() - started_s)
    for size in SIZES:
        with results.guarded(f"{size} bytes"):
            message = torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()
            times_s = []
            for _ in range(20):
                buffer = group.host_buffer(size)
                started_s = time.perf_counter()
                transfer = group.start((0, message, size), (0, buffer))
                while not transfer.is_through():
                    pass
                times_s.append(time.perf_counter() - started_s)
            ok = torch.equal(buffer, message)
            results.row(f"{size} bytes", ok=ok, microseconds=statistics.median(times_s[5:]) * 1e6)
        with results.guarded(f"{size} bytes on the device"):
            message = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
            times_s = []
            for _ in range(20):
                torch.cuda.synchronize(device)
                started_s = time.perf_counter()
                (arrived, headers), transfer = group.allgather(message, HEADER_BYTES)
                while not transfer.is_through():
                    pass
                times_s.append(time.perf_counter() - started_s)
            ok = torch.equal(arrived[0], message)
            ok = ok and torch.equal(headers[0], message[:HEADER_BYTES].cpu())
            median_us = statistics.median(times_s[5:]) * 1e6
            results.row(f"{size} bytes on the device", ok=ok, microseconds=median_us)
