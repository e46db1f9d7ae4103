"""One rank of `benchmarks.allreduce`: reductions through the optimizer, verified, then timed.

The model's backward hands over gradients that were made before. Backward and the optimizer's
`synchronize` are timed; the caller subtracts the time of backward alone.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from benchmarks._rank import (
    check_replicas,
    dist,
    end_rank,
    everywhere,
    in_turns,
    interface_bytes,
    make_gradients,
    relative_error,
    say,
    slowest_ranks,
    start_rank,
    turns_within,
)
from benchmarks.ways import Way, is_ours, make_way

SETS = 2
"""Different sets of gradients, used in turn."""
RATE = 2.0**-60
"""Learning rate."""
VERIFIED_STEPS = 12
"""Warm-up of our ways, until residuals have filled and thresholds have settled."""
FEWEST_TURNS = 4
SLICE_S, MOST_STEPS = 0.4, 6
"""A way's share of a turn: so many seconds, in at most so many steps."""
PHASES = ("stage_s", "accumulate_select_s", "exchange_s", "decode_s", "wait_s")


class HandOver(torch.autograd.Function):
    """A loss of 0 whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return None, *ctx.gradients


class Given(nn.Module):
    """Parameters of given shapes, and a loss that has given gradients.

    The parameters of all such modules share memory, and hardly change: the rate is tiny. A
    reduction at a rate of 0 would not count. The last one has its gradient first, as in real
    models.
    """

    def __init__(self, shapes: list[list[int]], weights: Tensor, sets: list[Tensor]) -> None:
        super().__init__()
        numels = [torch.Size(shape).numel() for shape in shapes]
        views = zip(weights.split(numels), shapes, strict=True)
        self.tensors = nn.ParameterList(nn.Parameter(part.view(shape)) for part, shape in views)
        self.sets = [
            [p.view(s) for p, s in zip(flat.split(numels), shapes, strict=True)][::-1]
            for flat in sets
        ]

    def forward(self, which: int) -> Tensor:
        hand_over: Any = HandOver.apply
        loss: Tensor = hand_over(self.sets[which], *list(self.tensors)[::-1])
        return loss


def make_ways(case: dict[str, Any], sets: list[Tensor]) -> dict[str, Way]:
    """All ways of a case; `name#B` is a way whose vector is cut into B tensors, each a bucket."""
    weights = torch.zeros_like(sets[0])
    ways = {}
    for name in case["ways"]:
        base, _, buckets = name.partition("#")
        shapes, options = case["shapes"], {}
        if buckets:
            [(rows, columns)] = shapes
            shapes = [[rows // int(buckets), columns]] * int(buckets)
            options = {"bucket_numel": rows // int(buckets) * columns}
        ways[name] = make_way(base, Given(shapes, weights, sets), RATE, **options)
    return ways


def reduce(way: Way, turn: int) -> tuple[float, float]:
    """Seconds of a reduction with its backward: wall clock, and the main thread's CPU time."""
    way.module.zero_grad()
    loss = way.module(turn % SETS)
    dist.barrier()
    start, own = time.perf_counter(), time.thread_time()
    loss.backward()
    way.synchronize()
    taken = time.perf_counter() - start, time.thread_time() - own
    dist.barrier()
    way.update()
    return taken


def flat_gradients(way: Way) -> Tensor:
    """The optimizer's gradients as one vector."""
    return torch.cat([gradient.reshape(-1) for gradient in way.gradients()])


def verify_dense(way: Way, means: list[Tensor]) -> None:
    """Check that ranks agree, and that the mean is as accurate as the way promises."""
    assert way.first_error is not None
    for step in range(way.warmup_steps):
        reduce(way, step)
        if step == 0:
            error = relative_error([flat_gradients(way)], [means[0]])
            if not error <= way.first_error:  # also of NaN
                raise SystemExit(f"{way.name}: the mean is wrong by {error:g} of its norm")
    check_replicas(way.gradients(), way.name)


def verify_ours(way: Way, sets: list[Tensor], means: list[Tensor]) -> None:
    """Check that ranks agree bit for bit, and that everything was applied or kept."""
    applied, given = torch.zeros_like(sets[0]), torch.zeros_like(sets[0])
    for step in range(VERIFIED_STEPS):
        reduce(way, step)
        applied += flat_gradients(way)
        given += means[step % SETS]
        if step in (0, VERIFIED_STEPS - 1):
            check_replicas(way.gradients(), way.name)
    residual = way.compression.state_dict()["residual"]
    parts = [
        residual[key].reshape(-1) if key in residual else torch.zeros(p.numel())
        for key, p in way.module.named_parameters()
    ]
    kept = torch.cat(parts)
    dist.all_reduce(kept)
    error = relative_error([applied + kept / hvd.size()], [given])
    if not error <= 1e-3:
        raise SystemExit(f"{way.name}: applied and kept miss what was given by {error:g}")


def verify(ways: dict[str, Way], sets: list[Tensor]) -> None:
    """End the benchmark if a way gives wrong results."""
    means = [flat.clone() for flat in sets]
    for mean in means:
        dist.all_reduce(mean)
        mean.div_(hvd.size())
    for name, way in ways.items():
        say(f"  verifying {name}")
        if is_ours(name.partition("#")[0]):
            verify_ours(way, sets, means)
        elif name == "alone":
            reduce(way, 0)
        else:
            verify_dense(way, means)
        way.module.zero_grad()


def steps_in_a_turn(ways: dict[str, Way]) -> dict[str, int]:
    """Steps of every way in a turn, the same on all ranks: more if steps are short."""
    took = {name: reduce(way, 0)[0] for name, way in ways.items()}
    for way in ways.values():
        way.module.zero_grad()
    steps = {name: min(MOST_STEPS, max(1, round(SLICE_S / each))) for name, each in took.items()}
    agreed: dict[str, int] = hvd.broadcast_object(steps, 0, name="benchmark.steps")
    return agreed


def measure(ways: dict[str, Way], options: argparse.Namespace) -> dict[str, Any]:
    """Time the ways in turns, in an order that changes.

    The first of several steps is not counted: it finds the caches that another way left.
    """
    clock: dict[str, list[float]] = {name: [] for name in ways}
    own: dict[str, list[float]] = {name: [] for name in ways}
    sent = dict.fromkeys(ways, 0)
    steps = steps_in_a_turn(ways)
    for turn in turns_within(options.seconds, FEWEST_TURNS, options.repeats):
        for name in in_turns(list(ways), turn):
            before = interface_bytes(options.interface)
            for step in range(steps[name]):
                seconds, thread_seconds = reduce(ways[name], turn + step)
                if step or steps[name] == 1:
                    clock[name].append(seconds)
                    own[name].append(thread_seconds)
                ways[name].module.zero_grad()
            sent[name] += interface_bytes(options.interface) - before
    turns = turn + 1
    slowest, threads = slowest_ranks(clock), slowest_ranks(own)
    return {
        "turns": turns,
        "steps_in_a_turn": steps,
        "seconds": {name: median(each) for name, each in slowest.items()},
        "thread_seconds": {name: median(each) for name, each in threads.items()},
        "phases_s": {
            name: phases_of(way, turns * steps[name])
            for name, way in ways.items()
            if is_ours(name.partition("#")[0])
        },
        "interface_bytes": [
            {name: sent_bytes / (turns * steps[name]) for name, sent_bytes in rank.items()}
            for rank in everywhere(sent, "benchmark.sent")
        ],
    }


def phases_of(way: Way, steps: int) -> dict[str, float]:
    """Rank 0's median seconds of each phase, summed over buckets."""
    buckets = way.compression.stats().buckets
    histories = [list(bucket.history)[-steps:] for bucket in buckets]
    return {
        phase: median(sum(getattr(s, phase) for s in each) for each in zip(*histories, strict=True))
        for phase in PHASES
    }


def main() -> None:
    """Verify, time, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", type=json.loads, required=True, help="shapes, and names of ways")
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="limit for all turns")
    options = start_rank(parser)
    sets = make_gradients(sum(torch.Size(shape).numel() for shape in options.case["shapes"]), SETS)
    ways = make_ways(options.case, sets)
    verify(ways, sets)
    found = measure(ways, options)
    for way in ways.values():
        way.close()
    end_rank(options.out, found)


if __name__ == "__main__":
    main()
