"""One rank of `benchmarks.planner`: trains one model in several ways, which take turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from zlib import crc32

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from benchmarks._rank import end_rank
from benchmarks.models import MODELS, Single, shapes_of
from benchmarks.ways import is_settled
from hvd_sparse import Compression
from hvd_sparse.planner import Planner

DENSITY = 0.01
WARMUP_STEPS = 5
TURN_STEPS = 5
"""Timed steps of a turn; the first one after a change of ways is not timed."""
LONG_STEP_S = 1.0
"""A way with longer steps has one step per turn, which is timed."""
FEWEST_TURNS = 3


class Computed(torch.autograd.Function):
    """A layer whose backward takes a time, and whose weight has a given gradient."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, weight: Tensor, gradient: Tensor, wait_s: float) -> Tensor:
        ctx.gradient, ctx.wait_s = gradient, wait_s
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        time.sleep(ctx.wait_s)  # as on a device: the processor is free meanwhile
        return outputs[0], ctx.gradient.clone(), None, None


class Listed(nn.Module):
    """A model's tensors, and a backward that takes a time in proportion to their elements."""

    def __init__(self, shapes: list[tuple[int, ...]], compute_s: float, seed: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        generator = torch.Generator().manual_seed(seed)
        self.gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        total = sum(p.numel() for p in self.tensors)
        self.waits_s = [compute_s * p.numel() / total for p in self.tensors]

    def forward(self) -> Tensor:
        chain = torch.zeros(1, requires_grad=True)
        for layer in zip(self.tensors, self.gradients, self.waits_s, strict=True):
            chain = Computed.apply(chain, *layer)  # type: ignore[no-untyped-call]
        return chain.sum()

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return ()


class Contestant:
    """One way to train the model.

    Args:
        way: `dense`, `uncompressed`, `planned`, or the name of a collective for all tensors.
        model_name: A name of `MODELS`.
        compute_s: Simulated seconds of backward; 0: the model itself is trained.
    """

    def __init__(self, way: str, model_name: str, compute_s: float) -> None:
        torch.manual_seed(0)  # every rank has the same weights
        self.model: Any = MODELS[model_name]() if not compute_s else None
        if self.model is None:
            self.model = Listed(shapes_of(model_name), compute_s, 1 + hvd.rank())
        self.generator = torch.Generator().manual_seed(1 + hvd.rank())
        named = [(f"{way}.{name}", p) for name, p in self.model.named_parameters()]
        self.compression = compression_of(way, named)
        self.planner: Planner | None = self.compression.method if way == "planned" else None
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1e-3),
            named_parameters=named,
            compression=self.compression,
        )
        self.seconds: list[float] = []

    def step(self) -> float:
        """Seconds of one step."""
        start = perf_counter()
        self.model.zero_grad()
        self.model(*self.model.batch(self.generator)).backward()
        self.optimizer.step()
        return perf_counter() - start

    def prepare(self) -> float:
        """Train until the planner has decided, then some steps; returns their median.

        What its plans had not sent of tensors that stay dense is out by then.
        """
        self.step()  # the planner is at work from the first gradient on
        while not is_settled(self.compression):
            self.step()
        return median(self.step() for _ in range(WARMUP_STEPS))

    def checksums(self) -> dict[str, int]:
        """Checksums of all weights."""
        return {n: crc32(p.detach().numpy().data) for n, p in self.model.named_parameters()}


def compression_of(way: str, named: list[tuple[str, nn.Parameter]]) -> Any:
    """The compression of a way."""
    if way == "dense":
        return Compression.none
    if way == "uncompressed":
        return Compression.topk(named, dense_below=2**31)
    if way == "planned":
        rule = {"compress": "auto", "compressor": "topk", "density": DENSITY}
        policy = {"version": 1, "plan_cache": "none", "rules": [rule]}
        return Compression.from_policy(policy, named)
    return Compression.topk(named, density=DENSITY, collective=way)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways, in turns: so many steps, or as many as fit into so many seconds."""
    every = {way: Contestant(way, options.model, options.compute_s) for way in options.ways}
    expected_s = {way: contestant.prepare() for way, contestant in every.items()}
    settling, timed, turns = turns_of(expected_s, options)
    turn = 0
    while turn < turns:
        for way in list(every)[:: -1 if turn % 2 else 1]:
            for _ in range(settling[way]):
                every[way].step()
            every[way].seconds += [every[way].step() for _ in range(timed[way])]
        turn += 1
        if turn == 1:  # a way that waits for a core may have become slower beside the others
            expected_s = {way: median(contestant.seconds) for way, contestant in every.items()}
            settling, timed, turns = turns_of(expected_s, options)
    # One exchange for all: where ranks share cores, each one takes seconds.
    mine = {way: (contestant.seconds, contestant.checksums()) for way, contestant in every.items()}
    ranks = hvd.allgather_object(mine, name="results")
    found: dict[str, Any] = {}
    for way, contestant in every.items():
        for rank, theirs in enumerate(ranks):
            assert theirs[way][1] == mine[way][1], f"{way}: ranks {hvd.rank()} and {rank} differ"
        steps_s = zip(*(theirs[way][0] for theirs in ranks), strict=True)
        found[way] = {"step_s": median(max(at) for at in steps_s)}
        if contestant.planner is not None:
            found[way] |= described(contestant.planner)
    return found


def turns_of(
    mine: Mapping[str, float], options: argparse.Namespace
) -> tuple[dict[str, int], dict[str, int], int]:
    """Untimed and timed steps of each way in a turn, and turns, from the time of its steps.

    A collective call: rank 0's times count.
    """
    expected_s = hvd.broadcast_object(dict(mine), name="expected")
    settling = {way: int(seconds < LONG_STEP_S) for way, seconds in expected_s.items()}
    timed = {way: TURN_STEPS if settles else 1 for way, settles in settling.items()}
    round_s = sum((settling[way] + timed[way]) * expected_s[way] for way in expected_s)
    turns = min(options.steps // TURN_STEPS, int(options.seconds * len(expected_s) / round_s))
    return settling, timed, max(FEWEST_TURNS, turns)


def described(planner: Planner) -> Mapping[str, Any]:
    """The plan, and the trial behind it."""
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
    """Run all ways, and write what rank 0 found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interface")  # every launch gives it
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--ways", nargs="+", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--compute-s", type=float, default=0.0)
    parser.add_argument("--single-numel", type=int, default=Single.numel)
    options = parser.parse_args()
    Single.numel = options.single_numel
    hvd.init()
    torch.set_num_threads(1)
    end_rank(options.out, run(options))


if __name__ == "__main__":
    main()
