"""One rank of `benchmarks.allreduce`: verifies, then times, every way to reduce one gradient."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from socket import gethostbyname, gethostname
from statistics import median
from time import perf_counter
from typing import Any
from zlib import crc32

import horovod.torch as hvd
import torch
import torch.distributed
from torch import Tensor

from hvd_sparse.collectives import Collective, OkTopk, TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.choose import create_transport
from hvd_sparse.transports.horovod_bootstrap import HorovodBootstrap

dist: Any = torch.distributed  # its type hints leave out what is used here
WARMUP_STEPS = 20
"""Steps before anything is timed: residuals have filled, thresholds have settled."""
GRADIENTS = 4
"""Different gradients, used in turn."""


def make_gradients(numel: int) -> list[Tensor]:
    """Heavy-tailed gradients whose large entries the ranks partly share, as in data parallelism."""
    shared = torch.Generator().manual_seed(1)
    scale = torch.randn(numel, generator=shared).exp_()
    own = torch.Generator().manual_seed(2 + hvd.rank())
    return [torch.randn(numel, generator=own).mul_(scale) for _ in range(GRADIENTS)]


class SparseReduction:
    """The whole path of a sparse gradient: submit, accumulate, select, exchange, decode."""

    def __init__(self, collective: Callable[..., Collective], numel: int, density: float) -> None:
        world = HorovodBootstrap(hvd.global_process_set)
        self.transport: Transport = create_transport("auto", world, 60.0)
        method = Method(density, numel, ReusedThreshold, collective, "benchmark")
        self.engine = Engine(method)
        self.engine.connect(self.transport)
        self.spec = TensorSpec("gradient", (numel,), "torch.float32")

    def __call__(self, gradient: Tensor) -> Tensor:
        self.engine.submit(self.spec, gradient)
        self.engine.scale = 1.0 / hvd.size()
        return self.engine.result("gradient")


def torch_gloo_allreduce(interface: str | None) -> Callable[[Tensor], object]:
    """torch.distributed's own allreduce over gloo, as one of its users would call it."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface or "lo"
    store_host = gethostbyname(gethostname()) if interface else "127.0.0.1"
    store = dist.TCPStore(store_host, 0, is_master=True) if hvd.rank() == 0 else None
    meeting = (store_host, store.port) if store else None
    host, port = hvd.broadcast_object(meeting, 0, name="benchmark.store")
    store = store or dist.TCPStore(host, port)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    allreduce: Callable[[Tensor], object] = dist.all_reduce
    return allreduce


def verify(reduction: SparseReduction, gradients: list[Tensor]) -> None:
    """Ranks agree on every bit, and what was given is what was applied or kept."""
    given, applied = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    checksums = []
    for step in range(WARMUP_STEPS):
        gradient = gradients[step % GRADIENTS]
        given += gradient
        result = reduction(gradient)
        applied += result
        checksums.append(crc32(result.numpy().data))
    for rank, theirs in enumerate(hvd.allgather_object(checksums, name="checksums")):
        assert theirs == checksums, f"ranks {hvd.rank()} and {rank} have different results"
    kept = reduction.engine.state_dict()["residual"]["gradient"]
    total = hvd.allreduce(given, op=hvd.Average)
    rest = hvd.allreduce(kept, op=hvd.Average)
    torch.testing.assert_close(applied + rest, total, rtol=1e-3, atol=1e-3)


def timed(function: Callable[[Tensor], object], gradient: Tensor) -> float:
    """Seconds of one call on this rank.

    The ranks meet in torch's barrier, which sleeps: Horovod's spins, and on few cores the ranks
    that wait in it would slow down those that still work.
    """
    dist.barrier()
    start = perf_counter()
    function(gradient)
    seconds = perf_counter() - start
    dist.barrier()
    return seconds


def interface_bytes(interface: str) -> int:
    """Bytes that a network interface has sent."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def bytes_per_step(
    reduction: SparseReduction, gradients: list[Tensor], interface: str | None
) -> tuple[float, float | None]:
    """Bytes that this rank sent per step: by our count, and by its interface's."""
    steps = 20
    dist.barrier()
    counted = reduction.transport.traffic.snapshot()
    seen = interface_bytes(interface) if interface else 0
    for step in range(steps):
        reduction(gradients[step % GRADIENTS])
    ours = reduction.transport.traffic.since(counted).bytes_sent / steps
    return ours, (interface_bytes(interface) - seen) / steps if interface else None


def time_contenders(
    gradients: list[Tensor], options: argparse.Namespace, gloo_allreduce: Callable[[Tensor], object]
) -> dict[str, Any]:
    """Median seconds of the slowest rank for every way to reduce, and Ok-Topk's phases."""
    oktopk = SparseReduction(OkTopk, options.numel, options.density)
    allgather = SparseReduction(TopkAllgather, options.numel, options.density)
    for reduction in (oktopk, allgather):
        verify(reduction, gradients)

    dense = gradients[0].clone()  # reduced in place, as a gradient is
    contenders: dict[str, Callable[[Tensor], object]] = {
        "horovod": lambda _: hvd.allreduce_(dense, name="dense", op=hvd.Average),
        "gloo": lambda _: gloo_allreduce(dense),
        "oktopk": oktopk,
        "topk_allgather": allgather,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(options.repeats + 2):  # two rounds for caches and connections
        dense.copy_(gradients[0])
        for name, function in contenders.items():
            taken = timed(function, gradients[repeat % GRADIENTS])
            if repeat >= 2:
                seconds[name].append(taken)

    everyone = hvd.allgather_object(seconds, name="seconds")
    history = list(oktopk.engine.stats().buckets[0].history)[-options.repeats :]
    phases = ("stage_s", "accumulate_select_s", "exchange_s", "decode_s")
    return {
        "seconds": {
            name: median(max(each) for each in zip(*(r[name] for r in everyone), strict=True))
            for name in contenders
        },
        "phases_s": {p: median(getattr(step, p) for step in history) for p in phases},
    }


def count_bytes(gradients: list[Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Bytes that each rank sends per Ok-Topk reduction, thresholds having settled."""
    oktopk = SparseReduction(OkTopk, options.numel, options.density)
    for step in range(WARMUP_STEPS):
        oktopk(gradients[step % GRADIENTS])
    mine = bytes_per_step(oktopk, gradients, options.interface)
    return {"bytes": hvd.allgather_object(mine, name="bytes")}


def main() -> None:
    """Verify, time, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--interface")
    parser.add_argument("--count-bytes", action="store_true", help="count bytes, time nothing")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)

    gradients = make_gradients(options.numel)
    gloo_allreduce = torch_gloo_allreduce(options.interface)
    if options.count_bytes:
        report = count_bytes(gradients, options)
    else:
        report = time_contenders(gradients, options, gloo_allreduce)
    if hvd.rank() == 0:
        options.out.write_text(json.dumps(report))
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
