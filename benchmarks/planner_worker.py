"""One rank of `benchmarks.planner`: trains one model in one way, and times its steps."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from zlib import crc32

import horovod.torch as hvd
import torch
from torch import nn

from benchmarks._rank import end_rank
from benchmarks.models import MODELS, Single
from hvd_sparse import Compression
from hvd_sparse.planner import Planner

DENSITY = 0.01
WARMUP_STEPS = 5
FEWEST_STEPS = 8
"""Steps that are timed, however long they take."""


def compression_of(way: str, model: nn.Module) -> Any:
    """`dense`, `uncompressed`, `planned`, or the name of a collective for all tensors."""
    if way == "dense":
        return Compression.none
    if way == "uncompressed":
        return Compression.topk(model.named_parameters(), dense_below=2**31)
    if way == "planned":
        rule = {"compress": "auto", "compressor": "topk", "density": DENSITY}
        policy = {"version": 1, "plan_cache": "none", "rules": [rule]}
        return Compression.from_policy(policy, model.named_parameters())
    return Compression.topk(model.named_parameters(), density=DENSITY, collective=way)


def check_replicas(model: nn.Module) -> None:
    """All ranks hold the same weights, bit for bit."""
    checksums = {name: crc32(p.detach().numpy().data) for name, p in model.named_parameters()}
    for rank, theirs in enumerate(hvd.allgather_object(checksums, name="checksums")):
        differing = [name for name, checksum in checksums.items() if theirs[name] != checksum]
        assert not differing, f"ranks {hvd.rank()} and {rank} have different {differing}"


def run(model_name: str, way: str, steps: int, seconds: float) -> dict[str, Any]:
    """Train, check, time: so many steps, or those that fit into so many seconds."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    generator = torch.Generator().manual_seed(1 + hvd.rank())
    compression = compression_of(way, model)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def training_step() -> None:
        model.zero_grad()
        model(*model.batch(generator)).backward()
        optimizer.step()

    planner = compression.method if way == "planned" else None
    training_step()  # the planner is at work from the first gradient on
    while planner is not None and planner.is_trying:
        training_step()
    expected_s = median(timed_s(training_step) for _ in range(WARMUP_STEPS))
    fitting = hvd.broadcast_object(int(seconds / expected_s), name="fitting")
    timed = [timed_s(training_step) for _ in range(max(FEWEST_STEPS, min(steps, fitting)))]
    check_replicas(model)

    every = hvd.allgather_object(timed, name="timed")
    found: dict[str, Any] = {"step_s": median(max(at) for at in zip(*every, strict=True))}
    if planner is not None and hvd.rank() == 0:
        found |= described(planner)
    return found


def timed_s(training_step: Callable[[], None]) -> float:
    """Seconds of one step."""
    start = perf_counter()
    training_step()
    return perf_counter() - start


def described(planner: Planner) -> dict[str, Any]:
    """The plan, and what was tried."""
    assert planner.outcome is not None
    outcome = planner.outcome
    chosen = outcome.tried[outcome.chosen]
    return {
        "predicted_s": chosen.predicted_s,
        "tried_s": chosen.took.step_s,
        "sparse_tensors": chosen.sparse_tensors,
        "tried": outcome.to_json()["tried"],
    }


def main() -> None:
    """Run one way, and write what rank 0 found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--way", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--single-numel", type=int, default=Single.numel)
    options = parser.parse_args()
    Single.numel = options.single_numel
    hvd.init()
    torch.set_num_threads(1)
    found = run(options.model, options.way, options.steps, options.seconds)
    end_rank(options.out, found)


if __name__ == "__main__":
    main()
