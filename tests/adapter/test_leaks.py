"""A compression that is dropped without `close()` takes its thread and connections along."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import psutil
import pytest
import torch
from torch import nn

from hvd_sparse import Compression
from tests.asleep import meet
from tests.launch import horovodrun
from tests.lean import start_lean

WIDTH = 1024


def train_and_drop() -> list[weakref.ref[object]]:
    """Two steps of a model of 1 M and of an embedding; returns what must not outlive them."""
    model = nn.Linear(WIDTH, WIDTH)
    embedding = nn.Embedding(50, 8, sparse=True)
    named = [*model.named_parameters()]
    named += ((f"embedding.{name}", p) for name, p in embedding.named_parameters())
    compression = Compression.oktopk(named, density=0.01)
    compression.exchange_embeddings(embedding.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.01),
        named_parameters=named,
        compression=compression,
    )
    for _ in range(2):
        model.zero_grad()
        embedding.zero_grad()
        hidden = embedding(torch.arange(4)).sum()
        (model(torch.ones(2, WIDTH)).sum() * hidden).backward()
        optimizer.step()
    return [weakref.ref(thing) for thing in (model, embedding.weight, optimizer, compression)]


def settled(count: Callable[[], int]) -> int:
    """The least of some looks: other threads are still closing what was let go of."""
    least = count()
    for _ in range(10):
        time.sleep(0.05)
        least = min(least, count())
    return least


def held() -> dict[str, int]:
    """What this process holds; memory without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return {
        "threads": settled(threading.active_count),
        "native_threads": settled(lambda: len(list(Path("/proc/self/task").iterdir()))),
        "descriptors": settled(lambda: len(list(Path("/proc/self/fd").iterdir()))),
        "resident": psutil.Process().memory_info().rss,
    }


def main() -> None:
    first, more = int(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    start_lean()
    for part, rounds in enumerate((first, more)):
        for _ in range(rounds):
            alive = train_and_drop()
            gc.collect()
            assert all(reference() is None for reference in alive), [ref() for ref in alive]
            meet("round")  # the other rank has let go, too
        figures = " ".join(f"{name}={value}" for name, value in held().items())
        print(f"HELD {part} rank={hvd.rank()} {figures}", flush=True)
    hvd.shutdown()


pytestmark = pytest.mark.launches

FIRST, MORE = 3, 9
MODEL_BYTES = 4 * 1024 * 1024


@pytest.mark.timeout(300)
def test_dropped_compressions_leave_nothing() -> None:
    # By default, malloc makes arenas for new threads, and keeps much in each.
    few_arenas = {"MALLOC_ARENA_MAX": "2"}
    done = horovodrun(2, "adapter/test_leaks.py", FIRST, MORE, env=few_arenas, timeout=280)
    held: dict[tuple[str, str], dict[str, int]] = {}
    for line in done.stdout.splitlines():
        if "HELD " in line:
            part, *figures = line.partition("HELD ")[2].split()
            found = dict(figure.split("=") for figure in figures)
            held[part, found.pop("rank")] = {name: int(value) for name, value in found.items()}
    assert len(held) == 4, done.stdout
    for rank in "01":
        before, after = held["0", rank], held["1", rank]
        grown_by = after.pop("resident") - before.pop("resident")
        # A socket may still be closing in the first look; what stays behind does so in each round.
        assert all(after[name] <= figure for name, figure in before.items()), (before, after)
        assert grown_by < MORE * MODEL_BYTES / 2, grown_by  # a residual is as large as the model


if __name__ == "__main__":
    main()
