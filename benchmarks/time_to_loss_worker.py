"""One rank of `benchmarks.time_to_loss`: trains a language model in one way, by the clock.

Steps are timed in stretches. Between stretches the loss on held-out text is measured and, every
minute, a checkpoint is written; neither counts. A stopped launch continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from benchmarks._rank import check_replicas, dist, end_rank, everywhere, say, start_rank
from benchmarks.corpus import MOST_BYTES, Vocabulary, python_sources, windows
from benchmarks.models import CausalTransformer35, Lstm24
from benchmarks.ways import SPARSE_ADAMW, UNAVERAGED, Way, is_ours, make_way

LENGTH = 32
LR_WARMUP_STEPS = 10
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, fused=True),  # a quarter of the time of torch's default
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
CLIP_NORMS = {"adam": 1.0, "adamw": 1.0}
"""Limits on the averaged gradient's norm. What DGC brings has the momentum in it: no limit of a
gradient suits that. `sparse_adamw` clips each rank's own."""
VALIDATION_BATCHES, VALIDATION_BATCH = 8, 32
FIRST_STEPS = 4
"""Of the first stretch, which tells how many steps the others have."""
STATE = "rank{}.pt"


class Text:
    """The corpus in tokens, and this rank's share of it.

    Attributes:
        digest: Identifies the corpus.
    """

    def __init__(self, most_bytes: int, seed: int, batch: int, tokens: int) -> None:
        corpus = python_sources(most_bytes)
        vocabulary = Vocabulary.of(corpus.train, tokens)
        self.digest = corpus.digest
        self._train, validation = map(vocabulary.encode, (corpus.train, corpus.validation))
        self._batch = batch
        self.generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        fixed = torch.Generator().manual_seed(hvd.rank())  # the same for all ways and seeds
        self.validation = [
            windows(validation, VALIDATION_BATCH, LENGTH, fixed) for _ in range(VALIDATION_BATCHES)
        ]

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next batch, from random places."""
        return windows(self._train, self._batch, LENGTH, self.generator)


class Run:
    """One training.

    Attributes:
        steps: Steps done.
        train_s: Seconds of the steps.
        curve: [seconds, steps, loss] of every measurement.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        lstm = options.model == "lstm"
        self.model = Lstm24(options.width) if lstm else CausalTransformer35()
        tokens = self.model.vocabulary
        self.text = Text(options.corpus_bytes, options.seed, options.batch, tokens)
        warmup: dict[str, Any] = {}
        if is_ours(options.way):
            warmup["warmup_steps"] = options.warmup_steps
        self.clip_norm = CLIP_NORMS.get(options.optimizer)
        if options.way.startswith(SPARSE_ADAMW):
            warmup["clip_norm"], self.clip_norm = self.clip_norm, None
        optimizer = OPTIMIZERS[options.optimizer]
        self.way: Way = make_way(options.way, self.model, options.lr, optimizer, **warmup)
        self.steps, self.train_s, self.stretch_steps = 0, 0.0, FIRST_STEPS
        self.curve: list[tuple[float, int, float]] = []

    def stretch(self) -> None:
        """Train some steps, timed."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.stretch_steps):
            self._step()
        dist.barrier()
        taken_s = hvd.broadcast_object(time.perf_counter() - start, 0, name="benchmark.taken")
        self.train_s += taken_s
        fitting = self.options.every_seconds / (taken_s / self.stretch_steps)
        self.stretch_steps = max(1, round(fitting))

    def _step(self) -> None:
        for group in self.way.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (self.steps + 1) / LR_WARMUP_STEPS)
        self.way.module.zero_grad()
        self.way.module(*self.text.batch()).backward()
        self.way.synchronize()
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.way.update()
        self.steps += 1

    def measure(self) -> None:
        """The loss on held-out text; each rank evaluates a part."""
        with torch.no_grad():
            mine = sum(float(self.model(*batch)) for batch in self.text.validation)
        everyone = everywhere(mine / VALIDATION_BATCHES, "benchmark.loss")
        self.curve.append((self.train_s, self.steps, sum(everyone) / len(everyone)))

    def save(self, folder: Path) -> None:
        """Write a checkpoint, then replace the previous one by it."""
        fresh = folder.with_name(folder.name + ".new")
        if hvd.rank() == 0:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        dist.barrier()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.way.optimizer.state_dict(),
            "generator": self.text.generator.get_state(),
            "progress": (self.steps, self.train_s, self.stretch_steps, self.curve),
        }
        torch.save(state, fresh / STATE.format(hvd.rank()))
        if self.way.compression is not None:
            self.way.compression.save_checkpoint(fresh / "compression")
        dist.barrier()
        if hvd.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Continue from the checkpoint, if there is one.

        PowerSGD begins anew, with two dense steps: its error is laid out as DDP's buckets were.
        """
        if not folder.exists():
            return
        state = torch.load(folder / STATE.format(hvd.rank()), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.way.optimizer.load_state_dict(state["optimizer"])
        self.text.generator.set_state(state["generator"])
        if self.way.compression is not None:
            self.way.compression.load_checkpoint(folder / "compression")
        self.steps, self.train_s, self.stretch_steps, self.curve = state["progress"]
        say(f"  goes on from step {self.steps}")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train until the time is over."""
    run = Run(options)
    run.load(options.checkpoint)
    if not run.curve:
        run.measure()
    saved = time.perf_counter()
    while run.train_s < options.seconds:
        run.stretch()
        run.measure()
        say(
            f"  {options.way}: {run.train_s:.0f} of {options.seconds:.0f} s, step {run.steps}, "
            f"loss {run.curve[-1][2]:.3f}"
        )
        late = time.perf_counter() - saved > options.save_seconds
        if hvd.broadcast_object(late, 0, name="benchmark.late"):
            run.save(options.checkpoint)
            saved = time.perf_counter()
    if options.way not in UNAVERAGED:
        check_replicas(list(run.model.parameters()), options.way)
    run.way.close()
    return {
        "curve": run.curve,
        "digest": run.text.digest,
        "numel": sum(p.numel() for p in run.model.parameters()),
        "optimizer": options.optimizer,
        "model": run.model.title,
    }


def main() -> None:
    """Train, and write what rank 0 found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--way", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of training")
    parser.add_argument("--every-seconds", type=float, required=True, help="a measurement")
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--model", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--batch", type=int, default=4, help="windows of 32 tokens per rank")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--warmup-steps", type=int, default=0, help="of our density")
    parser.add_argument("--corpus-bytes", type=int, default=MOST_BYTES)
    options = start_rank(parser)
    found = train(options)
    end_rank(options.out, found)


if __name__ == "__main__":
    main()
