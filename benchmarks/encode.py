"""Times every compressor's hot path on one rank, merging, and decoding.

`python -m benchmarks.encode --json FILE`, and `--device cuda`

The residual is that of a running job: a few steps of exact top-k have passed over it. Every result
is compared with the torch reference before anything is timed; then ours and the baselines take
turns, and medians are reported. On a CUDA device kernels are timed by events, and compared with a
copy that moves as many bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks._encode_cuda import encode_cuda_rows
from benchmarks._encode_paths import ADD, HotPath, Limit, hot_paths
from benchmarks._timing import NUMELS, check, goal_row, take_turns
from benchmarks.report import Row, write_report
from hvd_sparse import ops
from hvd_sparse.ops import reference
from hvd_sparse.ops._dispatch import REFERENCE, Ops
from hvd_sparse.ops.cuda import CupyLauncher
from tools.kernels import Job, gradient_like

CPU_NUMEL = 25_000_000
DENSITIES = (1e-3, 1e-2)
WORLD_SIZE = 8


CHECKED = cast("Ops", ops)


def verify(path: HotPath, job: Job) -> None:
    """Compares the result and the state after it with the reference's."""
    job.reset()
    actual = (path.run(CHECKED, job), job.state())
    job.reset()
    check(actual, (path.run(REFERENCE, job), job.state()), path.metric)


def encode_rows(job: Job, case: str, goals: bool, lowest: bool, repetitions: int) -> list[Row]:
    paths = hot_paths(job)
    contenders: dict[str, Callable[[], object]] = {ADD: lambda: job.residual.add_(job.gradient)}
    for path in paths:
        verify(path, job)
        contenders[path.metric] = partial(path.run, CHECKED, job)
        for name, pipeline in path.torch.items():
            contenders[f"{path.metric}: {name}"] = partial(pipeline, job)
    t = take_turns(contenders, job.reset, repetitions, job.device)
    rows = []
    for path in paths:
        for name, limit in path.against.items():
            applies = goals and (lowest or limit.everywhere)
            rows.append(share_row(case, path.metric, name, limit, applies, t))
        torch_s = {name: t[f"{path.metric}: {name}"] for name in path.torch}
        for name, seconds in torch_s.items():
            fastest = seconds == min(torch_s.values())
            goal = path.speedup if goals and lowest and fastest else None
            rows.append(goal_row(case, path.metric, t[path.metric], name, seconds, goal))
    return rows


def share_row(
    case: str, metric: str, baseline: str, limit: Limit, goal: bool, t: Mapping[str, float]
) -> Row:
    """A row that compares a path with a share of a baseline."""
    allowed_s = limit.share * t[baseline]
    share = "" if limit.share == 1.0 else f"{limit.share:.3g} of "
    factor = limit.factor if goal else None
    return Row(
        case=case,
        metric=metric,
        value=t[metric] * 1e3,
        unit="ms",
        baseline=f"{share}{baseline}: {allowed_s * 1e3:.2f} ms",
        ratio=allowed_s / t[metric],
        goal=None if factor is None else f"at most {factor:g} times {share}{baseline}",
        met=None if factor is None else t[metric] <= factor * allowed_s,
    )


def stream_rows(
    numel: int, density: float, case: str, repetitions: int, device: torch.device
) -> list[Row]:
    """Rows for merging the streams of several ranks, and decoding the result."""
    streams = []
    for rank in range(WORLD_SIZE):
        x = gradient_like(numel, 100 + rank, device)
        threshold = reference.kth_magnitude(x, max(1, round(numel * density)))
        streams.append(ops.accumulate_select(ops.Accumulation(x), threshold))
    kernels = ops.on(x.device)
    merged = kernels.merge_sum(streams, numel)
    check(merged, reference.merge_sum(streams, numel), "merge_sum")
    ours, theirs = torch.empty(numel, device=device), torch.empty(numel, device=device)
    kernels.decode(ours, *merged)
    reference.decode(theirs, *merged)
    check(ours, theirs, "decode")

    # torch wants long indices, and is given them for nothing.
    all_indices = torch.cat([indices for indices, _ in streams]).long().view(1, -1)
    all_values = torch.cat([values for _, values in streams])
    merged_indices, merged_values = merged[0].long(), merged[1]

    def torch_merge() -> Tensor:
        return torch.sparse_coo_tensor(
            all_indices, all_values, (numel,), check_invariants=False
        ).coalesce()

    merge, decode = f"merge of {WORLD_SIZE} streams", f"decode of {WORLD_SIZE} merged streams"
    clear = "out.zero_()"
    t = take_turns(
        {
            merge: lambda: kernels.merge_sum(streams, numel),
            "torch coalesce": torch_merge,
            decode: lambda: kernels.decode(ours, *merged),
            "torch zero_, scatter_": lambda: theirs.zero_().scatter_(
                0, merged_indices, merged_values
            ),
            clear: theirs.zero_,
        },
        lambda: None,
        repetitions,
        device,
    )
    return [
        goal_row(case, merge, t[merge], "torch coalesce", t["torch coalesce"], None),
        goal_row(
            case, decode, t[decode], "torch zero_, scatter_", t["torch zero_, scatter_"], None
        ),
        share_row(case, decode, clear, Limit(), False, t),
    ]


def cpu_rows(numel: int, threads: str, device: torch.device, repetitions: int) -> list[Row]:
    rows = []
    for count in map(int, threads.split(",")):
        torch.set_num_threads(count)
        for density in DENSITIES:
            case = f"n={numel} density={density:g} threads={count} {device.type}"
            job = Job(numel, density, device)
            goals, lowest = device.type == "cpu", density == min(DENSITIES)
            rows += encode_rows(job, case, goals, lowest, repetitions)
            rows += stream_rows(numel, density, case, repetitions, device)
    return rows


def cuda_rows(numels: Sequence[int], device: torch.device, repetitions: int) -> list[Row]:
    launcher = CupyLauncher(device)
    rows = []
    for numel in numels:
        for density in DENSITIES:
            case = f"n={numel} density={density:g} {device.type}"
            rows += encode_cuda_rows(Job(numel, density, device), case, launcher, repetitions)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--numel", type=int, help="instead of the device's usual ones")
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=11)
    options = parser.parse_args()

    device = torch.device(options.device)
    if device.type == "cuda":
        numels = NUMELS if options.numel is None else (options.numel,)
        rows = cuda_rows(numels, device, options.repetitions)
    else:
        numel = CPU_NUMEL if options.numel is None else options.numel
        rows = cpu_rows(numel, options.threads, device, options.repetitions)
    write_report("encode", rows, options.json)


if __name__ == "__main__":
    main()
