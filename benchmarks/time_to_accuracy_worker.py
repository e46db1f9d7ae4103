"""One rank of `benchmarks.time_to_accuracy`: trains on Fashion-MNIST's images in one way."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks._rank import check_replicas, dist, end_rank, interface_bytes, say, start_rank
from benchmarks.convergence_tasks import FashionMnist
from benchmarks.ways import is_ours, make_way
from hvd_sparse import MomentumCorrectedSGD


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train for the task's steps; only they are timed, and not what measures the accuracy."""
    task = FashionMnist()
    budget, momentum = replace(task.budget, steps=options.steps), task.recipe.momentum
    arguments: dict[str, Any] = {}
    if is_ours(options.way):
        arguments = {"momentum": momentum, "warmup_steps": budget.warmup_steps}
    model = task.model(options.seed)
    optimizer = partial(MomentumCorrectedSGD, momentum=momentum)
    way = make_way(options.way, model, budget.lr, optimizer, **arguments)
    generator = torch.Generator().manual_seed(1000 * options.seed + hvd.rank())
    sent, train_s = interface_bytes(options.interface), 0.0
    curve: list[tuple[float, float]] = []
    every = max(1, budget.steps // options.points)
    for first in range(0, budget.steps, every):
        dist.barrier()
        start = time.perf_counter()
        for step in range(first, min(first + every, budget.steps)):
            for group in way.optimizer.param_groups:
                group["lr"] = budget.lr_at(step, task.recipe.lr_warmup_steps)
            way.module.zero_grad()
            task.loss(way.module, generator).backward()
            way.synchronize()
            way.update()
        dist.barrier()
        train_s += time.perf_counter() - start
        if hvd.rank() == 0:
            curve.append((train_s, task.evaluate(model)))
            say(f"  {options.way}: {train_s:.0f} s, {curve[-1][1]:.2f} %")
    dist.barrier()
    sent = interface_bytes(options.interface) - sent
    check_replicas(list(model.parameters()), options.way)
    way.close()
    return {"curve": curve, "mbytes": sent / 1e6}


def main() -> None:
    """Train, and write what rank 0 found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--points", type=int, required=True, help="of the curve")
    parser.add_argument("--steps", type=int, default=FashionMnist.budget.steps)
    options = start_rank(parser)
    found = train(options)
    end_rank(options.out, found)


if __name__ == "__main__":
    main()
