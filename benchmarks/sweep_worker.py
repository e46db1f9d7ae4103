"""One rank of `benchmarks.allreduce`'s sweep: all collectives on random streams."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from zlib import crc32

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks._rank import dist, end_rank, start_rank, timed
from benchmarks.patterns import PATTERNS, PatternStreams
from hvd_sparse.collectives.automatic import cheapest_algorithm, link_of
from hvd_sparse.collectives.registry import BY_NAME, STREAMED
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport

WARMUP_STEPS = 3


def dense(stream: SparseStream) -> Tensor:
    out = torch.zeros(stream.numel)
    out[stream.indices.long()] = stream.values
    return out


def verify(name: str, reduced: SparseStream, stream: SparseStream) -> None:
    """Check that ranks agree, and that results are the dense sum, or a part of it."""
    result = dense(reduced)
    assert len(set(hvd.allgather_object(crc32(result.numpy().data), name="checksum"))) == 1, name
    total = hvd.allreduce(dense(stream), op=hvd.Sum)
    if BY_NAME[name].is_lossless:
        torch.testing.assert_close(result, total, rtol=1e-5, atol=1e-4, msg=name)
    elif name == "oktopk":
        applied = reduced.indices.long()
        torch.testing.assert_close(result[applied], total[applied], rtol=1e-5, atol=1e-4, msg=name)


def measure(
    transport: Transport,
    numel: int,
    density: float,
    repeats: int,
    pattern: str,
) -> dict[str, Any]:
    """Time every algorithm at one density, and note the pick of "auto"."""
    k = max(1, round(density * numel))
    draw = PatternStreams(pattern=pattern).stream
    streams = [draw(hvd.rank(), step, numel, k, hvd.size()) for step in range(WARMUP_STEPS)]
    functions: dict[str, Callable[[], object]] = {}
    for name in STREAMED:
        collective = BY_NAME[name].collective(transport, numel, k)
        for stream in streams:
            reduction = collective.reduce(stream)
        verify(name, reduction.reduced.as_stream(), streams[-1])
        functions[name] = lambda reduce=collective.reduce: reduce(streams[-1])  # type: ignore[misc]
    vector = dense(streams[-1])
    functions["gloo"] = lambda: dist.all_reduce(vector)
    functions["gloo"]()
    return {
        "density": density,
        "k": k,
        "seconds": timed(functions, repeats),
        "chosen": cheapest_algorithm(transport, numel, k),
    }


def main() -> None:
    """Measure every density, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--density", type=float, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--pattern", choices=PATTERNS, default="uniform")
    options = start_rank(parser)
    transport = create_transport("auto", HorovodBootstrap(hvd.global_process_set), 120.0)
    link = link_of(transport)
    found = [
        measure(transport, options.numel, density, options.repeats, options.pattern)
        for density in options.density
    ]
    facts = {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}
    facts |= {"reduction_s_per_byte": link.reduction_s_per_byte, "gap_s": link.g}
    end_rank(options.out, {"link": facts, "densities": found}, transport)


if __name__ == "__main__":
    main()
