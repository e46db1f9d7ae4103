"""Times decoding: from the streams of several ranks to a dense gradient.

`python -m benchmarks.decode --json FILE`, and `--device cuda`

The ranks' streams are added to a vector of zeros in the order of the ranks, so every rank gets the
same bits. Before timing, the result is compared with the reference's merge and decode.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._timing import GOAL_NUMEL, NUMELS, check, copy_row, goal_row, take_turns
from benchmarks.report import Row, write_report
from hvd_sparse import ops
from hvd_sparse.ops import reference
from tools.kernels import copy_speed, gradient_like, medians_s, whole_s

DENSITIES = (1e-3, 1e-2)
WORLD_SIZE = 8
CPU_NUMEL = 25_000_000
ENTRY_BYTES = 72
"""Traffic of a random entry: 8 bytes are read, and a sector of 32 bytes is read and written."""
LEAST = 0.72
"""The goal as a share of a copy's speed, at `GOAL_NUMEL` and the higher density."""

Streams = list[tuple[Tensor, Tensor]]


def decode_in_order(out: Tensor, streams: Streams) -> Tensor:
    out.zero_()
    for indices, values in streams:
        ops.on(out.device).scatter_add(out, indices, values)
    return out


def merge_and_decode(out: Tensor, streams: Streams) -> Tensor:
    kernels = ops.on(out.device)
    kernels.decode(out, *kernels.merge_sum(streams, out.numel()))
    return out


def torch_decode(out: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return out.zero_().index_add_(0, indices, values)


def rows_of(numel: int, density: float, device: torch.device, repetitions: int) -> list[Row]:
    streams: Streams = []
    for rank in range(WORLD_SIZE):
        x = gradient_like(numel, 100 + rank, device)
        threshold = reference.kth_magnitude(x, max(1, round(numel * density)))
        streams.append(ops.accumulate_select(ops.Accumulation(x), threshold))
    ours, expected = torch.empty(numel, device=device), torch.empty(numel, device=device)
    reference.decode(expected, *reference.merge_sum(streams, numel))
    check(decode_in_order(ours, streams), expected, "decoding in the ranks' order")
    check(merge_and_decode(ours, streams), expected, "merge and decode")

    all_indices = torch.cat([indices for indices, _ in streams])
    all_values = torch.cat([values for _, values in streams])
    contenders: dict[str, Callable[[], object]] = {
        "in order": partial(decode_in_order, ours, streams),
        "merge": partial(merge_and_decode, ours, streams),
        "torch": partial(torch_decode, expected, all_indices, all_values),
    }
    case = f"n={numel} density={density:g} P={WORLD_SIZE} {device.type}"
    if device.type == "cuda":
        timers = {name: partial(whole_s, run) for name, run in contenders.items()}
        t = medians_s(timers, lambda: None, repetitions)
    else:
        t = take_turns(contenders, lambda: None, repetitions, device)
    baseline = "torch zero_, index_add_ (by atomics on CUDA: sums in any order)"
    rows = [
        goal_row(case, "decode in the ranks' order", t["in order"], baseline, t["torch"], None),
        goal_row(case, "merge and decode", t["merge"], baseline, t["torch"], None),
    ]
    if device.type == "cuda":
        traffic = 4 * numel + ENTRY_BYTES * all_indices.numel()
        has_goal = numel == GOAL_NUMEL and density == max(DENSITIES)
        copy = copy_speed(numel, device, repetitions)
        least = LEAST if has_goal else None
        rows.append(
            copy_row(case, "decode in the ranks' order", t["in order"], traffic, copy, least)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--numel", type=int, help="instead of the device's usual ones")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()

    device = torch.device(options.device)
    usual = NUMELS if device.type == "cuda" else (CPU_NUMEL,)
    rows = []
    for numel in usual if options.numel is None else (options.numel,):
        for density in DENSITIES:
            rows += rows_of(numel, density, device, options.repetitions)
    write_report("decode", rows, options.json)


if __name__ == "__main__":
    main()
