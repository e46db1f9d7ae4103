"""Trains for many steps with faults that a training must survive, and checks its books.

    python -m tools.soak [--steps 20000] [--seed 0] [--json FILE]

Four ranks under horovodrun train a small model with a loss scaler. Every gradient is a whole
number, so the books must balance to the last bit: the gradients of all steps that counted equal the
change of the weights plus the residuals. Memory, descriptors and threads must not grow after the
settling phase. The exit status is 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from torch import Tensor, nn

from hvd_sparse import Compression

RANKS = 4
TIMEOUT_S = 20.0
"""Longer than a busy machine keeps a process waiting."""
BUSY_S = 1.1 * TIMEOUT_S

SETTLING = 0.4
"""Share of the steps after which memory must stay constant."""
PROGRESS_STEPS = 500

SCALE, SCALES = 2.0**8, (2.0**4, 2.0**14)
"""The first loss scale, and the range outside of which it is reset."""

STEPS_BETWEEN = {"spoil": 40, "load": 150, "reassign": 250, "reconnect": 400, "busy": 4000}
"""Each fault occurs once in about so many steps, and at least once."""

METHODS: dict[str, Callable[..., Any]] = {
    "oktopk": Compression.oktopk,
    "topk": Compression.topk,
    "exdyna": Compression.exdyna,
    "dgc": lambda *arguments, **options: Compression.dgc(*arguments, momentum=0.0, **options),
}


class Model(nn.Module):
    """Two tensors for the engine, and one that is too small for it."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(3000))
        self.other = nn.Parameter(torch.zeros(40, 50))
        self.bias = nn.Parameter(torch.zeros(30))


class Soak:
    """One rank's training.

    Args:
        steps: Number of steps.
        seed: Decides the faults of each step, the same on all ranks.
    """

    def __init__(self, steps: int, seed: int) -> None:
        self.steps = steps
        self.faults: Counter[str] = Counter()
        self.skipped = 0
        self._chance = random.Random(seed)
        # A first one of every kind, before the settling phase ends.
        first = self._chance.sample(range(2, int(SETTLING * steps)), len(STEPS_BETWEEN))
        self._first = dict(zip(first, STEPS_BETWEEN, strict=True))
        self.model = Model()
        self.compression = Compression.oktopk(
            self.model.named_parameters(), density=0.02, timeout_s=TIMEOUT_S, record="/dev/full"
        )
        self._optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
            op=hvd.Sum,
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=50)
        self.brought = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        self._gradients = torch.Generator().manual_seed(hvd.rank())

    def run(self) -> list[dict[str, int]]:
        """Train; returns this process's resources after settling and at the end."""
        held = []
        began_at = time.monotonic()
        for step in range(self.steps):
            self.step(self._faults_of(step))
            if step + 1 in (int(SETTLING * self.steps), self.steps):
                held.append(resources())
            if hvd.rank() == 0 and (step + 1) % PROGRESS_STEPS == 0:
                seconds = time.monotonic() - began_at
                faults = ", ".join(f"{count} {name}" for name, count in self.faults.items())
                memory = f"{resources()['resident'] / 1e6:.1f} MB"
                progress = f"step {step + 1} of {self.steps}, {seconds:.0f} s, {memory}: {faults}"
                print(progress, flush=True)
        return held

    def _faults_of(self, step: int) -> list[str]:
        by_chance = [n for n, apart in STEPS_BETWEEN.items() if self._chance.random() * apart < 1]
        names = sorted({*by_chance, *filter(None, [self._first.get(step)])})
        if "reconnect" in names and "busy" in names:  # ranks connect within timeout_s
            names.remove("busy")
        self.faults.update(names)
        return names

    def step(self, faults: list[str]) -> None:
        """One step with the faults of these names."""
        own = {
            name: torch.randint(-9, 10, p.shape, generator=self._gradients).float()
            for name, p in self.model.named_parameters()
        }
        self._between_steps(faults)
        spoils = self._chance.choice([*own]), self._chance.choice(["inf", "-inf", "nan"])
        spoilers = self._chance.sample(range(RANKS), self._chance.choice([1, RANKS]))
        busy = self._chance.randrange(RANKS)
        if "busy" in faults and hvd.rank() == busy:
            time.sleep(BUSY_S)
        self._optimizer.zero_grad()
        loss = torch.zeros(())
        for name, p in self.model.named_parameters():
            factor = own[name].clone()
            if "spoil" in faults and name == spoils[0] and hvd.rank() in spoilers:
                factor.view(-1)[7] = float(spoils[1])
            loss = loss + (p * factor).sum()
        self.scaler.scale(loss).backward()
        self._optimizer.synchronize()
        with self._optimizer.skip_synchronize():
            self.scaler.step(self._optimizer)
        kept = SCALES[0] <= self.scaler.get_scale() <= SCALES[1]
        self.scaler.update(None if kept else SCALE)
        if "spoil" in faults:
            self.skipped += 1
        else:
            for name, gradient in own.items():
                self.brought[name] += gradient

    def _between_steps(self, faults: list[str]) -> None:
        method, density = self._chance.choice([*METHODS]), self._chance.choice([0.01, 0.02, 0.05])
        if "load" in faults:
            file = io.BytesIO()
            torch.save(self.compression.state_dict(), file)
            file.seek(0)
            self.compression.load_state_dict(torch.load(file, weights_only=True))
        if "reassign" in faults:
            self.compression.reassign(METHODS[method](density=density).method)
        if "reconnect" in faults:
            self.compression.close()

    def imbalance(self) -> float:
        """The largest difference in the books of all ranks."""
        state, scale = self.compression.state_dict(), self.scaler.get_scale()
        worst = 0.0
        for name, p in self.model.named_parameters():
            left = state["residual"].get(name, torch.zeros_like(p)) / scale
            total = hvd.allreduce(self.brought[name], op=hvd.Sum, name=f"soak.brought.{name}")
            held = hvd.allreduce(left, op=hvd.Sum, name=f"soak.held.{name}")
            difference = (held - p.detach() - total).abs().max().item()
            worst = max(worst, float("inf") if math.isnan(difference) else difference)
        return worst


def resources() -> dict[str, int]:
    """Memory, descriptors and threads of this process."""
    return {
        "resident": psutil.Process().memory_info().rss,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def gathered(held: list[dict[str, int]]) -> list[dict[str, list[int]]]:
    """Gather the figures of all ranks, in order."""
    names = list(held[0])
    mine = torch.tensor([[point[name] for point in held for name in names]])
    table: Tensor = hvd.allgather(mine, name="soak.held")
    return [
        {name: table[:, len(names) * i + place].tolist() for place, name in enumerate(names)}
        for i in range(len(held))
    ]


def complaints(summary: dict[str, Any], growth: float) -> list[str]:
    """Everything that differs from what is expected."""
    settled, end = summary["settled"], summary["end"]
    found = []
    if summary["imbalance"] != 0:
        found.append(f"the books are off by {summary['imbalance']:g}")
    if summary["skipped_steps"] != summary["faults"]["spoil"]:
        found.append(f"{summary['skipped_steps']} steps were skipped, not one for each `spoil`")
    for rank in range(RANKS):
        if end["resident"][rank] > (1 + growth) * settled["resident"][rank]:
            found.append(f"rank {rank}: resident memory grew by more than {growth:.0%}")
        for name in ("descriptors", "threads"):
            if end[name][rank] != settled[name][rank]:
                was, now = settled[name][rank], end[name][rank]
                found.append(f"rank {rank}: {was} {name} are {now} in the end")
    return found


def run_rank(args: argparse.Namespace) -> int:
    """Train, and write the summary on rank 0; returns 1 if there are complaints."""
    hvd.init()
    torch.set_num_threads(1)
    began_at = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        soak = Soak(args.steps, args.seed)
        held = soak.run()
    points = gathered(held)
    off = sum("recording to /dev/full is off" in str(w.message) for w in caught)
    summary = {
        "steps": args.steps,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began_at, 1),
        "faults": {name: soak.faults[name] for name in STEPS_BETWEEN},
        "recordings_given_up": off,
        "skipped_steps": soak.compression.stats().skipped_steps,
        "imbalance": soak.imbalance(),
        "settled": points[0],
        "end": points[1],
    }
    summary["complaints"] = found = complaints(summary, args.growth)
    if hvd.rank() == 0:
        print(json.dumps(summary), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(summary, indent=2) + "\n")
    soak.compression.close()
    hvd.shutdown()
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--growth",
        type=float,
        default=0.01,
        help="share by which resident memory may grow after 40%% of the steps (default 0.01)",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the summary")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 200:
        parser.error(f"--steps must be at least 200, got {args.steps}")
    logging.basicConfig()
    if args.rank:
        return run_rank(args)
    command = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(RANKS)]
    command += ["-H", f"localhost:{RANKS}", "--gloo-timeout-seconds", "120", sys.executable]
    command += ["-m", "tools.soak", *sys.argv[1:], "--rank"]
    # Each connection's threads would get arenas anew, and malloc keeps much in each.
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"}
    environment = {**os.environ, **fixed}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
