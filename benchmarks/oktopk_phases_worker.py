"""One rank of `benchmarks.oktopk_phases`: verifies, then times, Ok-Topk and what it leaves out."""

from __future__ import annotations

import argparse
from statistics import median

import horovod.torch as hvd
import torch
import torch.distributed

from benchmarks._rank import dist, end_rank, start_rank
from benchmarks.oktopk_variants import (
    MeasuredOkTopk,
    NotOverlapped,
    NotRotated,
    UniformLevelled,
    UniformUnbalanced,
    skewed_stream,
)
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport

VARIANTS: dict[str, type[MeasuredOkTopk]] = {
    "oktopk": MeasuredOkTopk,
    "uniform regions, levelled": UniformLevelled,
    "uniform regions, no levelling": UniformUnbalanced,
    "not overlapped": NotOverlapped,
    "not rotated": NotRotated,
}
STREAMS = 3
WARMUP_STEPS = 4


def verify(results: dict[str, SparseStream]) -> None:
    """All variants apply the same sums, to rounding, where they apply the same indices."""
    ours = torch.zeros(results["oktopk"].numel)
    ours[results["oktopk"].indices.long()] = results["oktopk"].values
    for name, other in results.items():
        here = ours[other.indices.long()]
        common = here != 0
        assert int(common.sum()) > 0.8 * other.nnz, name
        torch.testing.assert_close(here[common], other.values[common], rtol=1e-4, atol=1e-4)


def measure(transport: Transport, numel: int, k: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of the slowest rank, by variant and phase; the variants take turns."""
    streams = [skewed_stream(hvd.rank(), step, numel, k) for step in range(STREAMS)]
    collectives = {name: variant(transport, numel, k) for name, variant in VARIANTS.items()}
    for step in range(WARMUP_STEPS):
        stream = streams[step % STREAMS]
        verify(
            {name: each.reduce(stream).reduced.as_stream() for name, each in collectives.items()}
        )
    seconds: list[dict[str, dict[str, float]]] = []
    for repeat in range(repeats):
        taken = {}
        for name, collective in collectives.items():
            dist.barrier()
            collective.reduce(streams[repeat % STREAMS])
            taken[name] = collective.seconds
        seconds.append(taken)
    everyone = hvd.allgather_object(seconds, name="seconds")
    phases = list(everyone[0][0]["oktopk"])
    return {
        name: {
            phase: median(
                max(rank[repeat][name][phase] for rank in everyone) for repeat in range(repeats)
            )
            for phase in phases
        }
        for name in VARIANTS
    }


def main() -> None:
    """Measure, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = start_rank(parser)
    transport = create_transport("auto", HorovodBootstrap(hvd.global_process_set), 120.0)
    k = max(1, round(options.density * options.numel))
    found = measure(transport, options.numel, k, options.repeats)
    end_rank(options.out, found, transport)


if __name__ == "__main__":
    main()
