"""One rank of `benchmarks.training` and `benchmarks.planner`: times steps of a model.

Ways to train it take turns. All of them start with the same weights and get the same batches. The
first averaged gradient of every dense way is compared with the mean, and every way's final weights
with those of the other ranks.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks._rank import (
    check_replicas,
    dist,
    end_rank,
    everywhere,
    in_turns,
    interface_bytes,
    processor_s,
    relative_error,
    say,
    slowest_ranks,
    start_rank,
    turns_within,
)
from benchmarks.models import MODELS, BenchmarkModel
from benchmarks.ways import UNAVERAGED, Way, is_settled, make_way
from hvd_sparse.planner import Planner

LEARNING_RATE = 1e-3
FEWEST_STEPS, MOST_STEPS = 3, 12
"""Timed ones of a turn, whose first step is not timed: another way has just used the caches."""
LONG_STEP_S = 3.0
"""Where steps take longer, a turn is a single step, which is timed: caches are nothing to it."""
FEWEST_TURNS = 3
PLANNING_LIMIT_S = 240.0


class Trained:
    """A way, its model and its place in the batches.

    Attributes:
        way: What trains.
        turn_steps: Timed steps of a turn.
        turn_s: Seconds per step, for every turn.
        cpu_s: Processor seconds of this rank's threads, for every turn, per step: of the
            training's own, of Horovod's, and of the others.
        sent_bytes: What the interface sent, for every turn, per step.
        hidden_shares: The share of the exchanges that backward hid, in every turn's last
            step.
    """

    def __init__(self, name: str, model: str, device: torch.device, batches: int) -> None:
        torch.manual_seed(0)
        self.device, self.batches = device, batches
        self.model: BenchmarkModel = MODELS[model]().to(device)
        self.way: Way = make_way(name, self.model, LEARNING_RATE)
        self.generator = torch.Generator().manual_seed(1 + hvd.rank())
        self.turn_steps = 1
        self.turn_s: list[float] = []
        self.cpu_s: list[dict[str, float]] = []
        self.sent_bytes: list[float] = []
        self.hidden_shares: list[float] = []

    def batch(self) -> list[Tensor]:
        """Several of the model's batches, as one."""
        drawn = [self.model.batch(self.generator) for _ in range(self.batches)]
        return [torch.cat(parts).to(self.device) for parts in zip(*drawn, strict=True)]

    def step(self) -> None:
        self.way.step(*self.batch())

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self, turn_seconds: float) -> None:
        """Train until steps are steady; the last one sets the length of a turn."""
        start = time.perf_counter()
        for _ in range(1, self.way.warmup_steps):
            self.step()
        while not is_settled(self.way.compression):
            self.step()
            late = time.perf_counter() - start > PLANNING_LIMIT_S
            if hvd.broadcast_object(late, 0, name="benchmark.late"):
                raise SystemExit(f"{self.way.name}: no plan after {PLANNING_LIMIT_S:g} s")
        self.finish()
        dist.barrier()
        start = time.perf_counter()
        self.step()
        self.finish()
        last_s = time.perf_counter() - start
        fitting = min(max(int(turn_seconds / last_s), FEWEST_STEPS), MOST_STEPS)
        steps = 1 if last_s > LONG_STEP_S else fitting
        self.turn_steps = hvd.broadcast_object(steps, 0, name="benchmark.fitting")

    def turn(self, interface: str | None) -> None:
        """Time some steps in a row."""
        dist.barrier()
        if self.turn_steps > 1:
            self.step()
        self.finish()
        before, start = interface_bytes(interface), time.perf_counter()
        worked = processor_s()
        for _ in range(self.turn_steps):
            self.step()
        self.finish()
        self.turn_s.append((time.perf_counter() - start) / self.turn_steps)
        now = processor_s()
        self.cpu_s.append({of: (now[of] - worked[of]) / self.turn_steps for of in now})
        self.sent_bytes.append((interface_bytes(interface) - before) / self.turn_steps)
        share = self.way.hidden_share
        if share is not None and self.device.type == "cpu":  # else backward ends on the device
            self.hidden_shares.append(share)

    @property
    def described(self) -> dict[str, Any]:
        """The planner's choice, with its step, and the share of exchanges that backward hides."""
        found: dict[str, Any] = {}
        planner = None if self.way.compression is None else self.way.compression.method
        if isinstance(planner, Planner) and planner.outcome is not None:
            plan = planner.outcome.best
            found = {"sparse_tensors": plan.sparse_tensors, "tried_s": plan.took.step_s}
            found["predicted_s"] = plan.predicted_s
        if self.hidden_shares:
            found["hidden_share"] = median(self.hidden_shares)
        return found


def first_step(trained: Trained, mean: list[Tensor] | None) -> list[Tensor]:
    """Train one step, compare its gradients with the mean of all ranks, and return that.

    Args:
        trained: The way that takes the step; without `mean`, the one that averages nothing.
        mean: The mean of the ranks' gradients.
    """
    way = trained.way
    way.step(*trained.batch())
    gradients = way.gradients()
    if mean is None:
        mean = [gradient.to_dense().clone() for gradient in gradients]
        for gradient in mean:
            dist.all_reduce(gradient)
            gradient.div_(hvd.size())
    elif way.first_error is not None:
        error = relative_error([gradient.to_dense() for gradient in gradients], mean)
        if not error <= way.first_error:  # also of NaN
            raise SystemExit(f"{way.name}: the mean is wrong by {error:g} of its norm")
    return mean


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Verify, warm up, take turns, compare the replicas."""
    ways: dict[str, Trained] = {}
    device = torch.device(options.device)
    mean: list[Tensor] | None = None
    for name in ["alone", *options.ways]:
        say(f"  {name}: verified, warmed up …")
        ways[name] = Trained(name, options.model, device, options.batches)
        mean = first_step(ways[name], mean)
        if options.apart and name == "alone" and options.ways:
            ways.pop(name).way.close()  # its mean is all that was needed
        else:
            ways[name].warm_up(options.turn_seconds)
    mean = None

    for turn in turns_within(options.seconds, FEWEST_TURNS, options.turns):
        for name in in_turns(list(ways), turn):
            ways[name].turn(options.interface)
    for name, trained in ways.items():
        if name not in UNAVERAGED:
            check_replicas(list(trained.model.parameters()), name)

    slowest = slowest_ranks({name: trained.turn_s for name, trained in ways.items()})
    mine = {
        name: (
            median(each.sent_bytes),
            {of: median(turn[of] for turn in each.cpu_s) for of in each.cpu_s[0]},
        )
        for name, each in ways.items()
    }
    everyone = everywhere(mine, "benchmark.sent")
    found = {
        name: {
            "step_s": median(slowest[name]),
            "turn_s": slowest[name],
            "turn_steps": trained.turn_steps,
            "host_bytes": max(rank[name][0] for rank in everyone),
            "cpu_s": max(sum(rank[name][1].values()) for rank in everyone),
            "threads_s": everyone[0][name][1],
            **trained.described,
        }
        for name, trained in ways.items()
    }
    for trained in ways.values():
        trained.way.close()
    told = f", on one {torch.cuda.get_device_name()}" if device.type == "cuda" else ""
    return {"ways": found, "device": told}


def main() -> None:
    """Run, and write rank 0's results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--ways", nargs="*", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=1, help="of the model's, in a step's batch")
    parser.add_argument("--apart", action="store_true", help="time no `alone` beside another way")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--turn-seconds", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="limit for all turns")
    options = start_rank(parser)
    found = run(options)
    end_rank(options.out, found)


if __name__ == "__main__":
    main()
