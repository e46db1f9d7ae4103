"""One rank of `benchmarks.allreduce` that counts bytes; the whole path without an optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any
from zlib import crc32

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks._rank import dist, end_rank, interface_bytes, make_gradients, start_rank
from hvd_sparse.collectives import Collective, OkTopk
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport

WARMUP_STEPS = 20
"""Steps before anything is timed: residuals have filled, thresholds have settled."""
GRADIENTS = 4
"""Different gradients, used in turn."""


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


def bytes_per_step(
    reduction: SparseReduction, gradients: list[Tensor], interface: str | None
) -> tuple[float, float | None]:
    """Bytes that this rank sent per step: by our count, and by its interface's."""
    steps = 20
    dist.barrier()
    counted = reduction.transport.traffic.snapshot()
    seen = interface_bytes(interface)
    for step in range(steps):
        reduction(gradients[step % GRADIENTS])
    ours = reduction.transport.traffic.since(counted).bytes_sent / steps
    return ours, (interface_bytes(interface) - seen) / steps if interface else None


def count_bytes(gradients: list[Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Bytes that each rank sends per Ok-Topk reduction, thresholds having settled."""
    oktopk = SparseReduction(OkTopk, options.numel, options.density)
    for step in range(WARMUP_STEPS):
        oktopk(gradients[step % GRADIENTS])
    mine = bytes_per_step(oktopk, gradients, options.interface)
    return {"bytes": hvd.allgather_object(mine, name="bytes")}


def main() -> None:
    """Count, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--density", type=float, required=True)
    options = start_rank(parser)
    gradients = make_gradients(options.numel, GRADIENTS)
    report = count_bytes(gradients, options)
    end_rank(options.out, report)


if __name__ == "__main__":
    main()
