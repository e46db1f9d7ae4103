"""One rank of `benchmarks.wire`: verifies, then measures, Ok-Topk over several wires."""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from typing import Any

import horovod.torch as hvd
from torch import Tensor

from benchmarks._rank import end_rank, make_gradients, start_rank
from benchmarks.allreduce_worker import (
    GRADIENTS,
    SparseReduction,
    bytes_per_step,
    timed,
    verify,
)
from hvd_sparse.collectives import OkTopk
from hvd_sparse.wire import WIRES


def measure(
    wires: list[str], gradients: list[Tensor], density: float, repeats: int
) -> dict[str, Any]:
    """Per wire, the median seconds of the slowest rank, and the bytes that each rank sends."""
    numel = gradients[0].numel()
    reductions = {
        name: SparseReduction(partial(OkTopk, wire=WIRES[name]), numel, density) for name in wires
    }
    seconds: dict[str, list[float]] = {name: [] for name in wires}
    for reduction in reductions.values():
        verify(reduction, gradients)
    for repeat in range(repeats):  # the wires take turns
        for name, reduction in reductions.items():
            seconds[name].append(timed(reduction, gradients[repeat % GRADIENTS]))
    mine = {name: bytes_per_step(each, gradients, None)[0] for name, each in reductions.items()}
    everyone = hvd.allgather_object((seconds, mine), name="figures")
    return {
        name: {
            "seconds": median(
                max(each) for each in zip(*(s[name] for s, _ in everyone), strict=True)
            ),
            "bytes": [sent[name] for _, sent in everyone],
        }
        for name in wires
    }


def main() -> None:
    """Measure, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--wire", nargs="+", required=True)
    options = start_rank(parser)
    gradients = make_gradients(options.numel, GRADIENTS)
    found = measure(options.wire, gradients, options.density, options.repeats)
    end_rank(options.out, found)


if __name__ == "__main__":
    main()
