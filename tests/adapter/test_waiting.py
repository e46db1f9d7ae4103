"""A rank that waits for a late one leaves its processor alone."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from hvd_sparse import Compression
from tests.ranks import Ranks, World, with_ranks

LATE_S = 1.0


class Halves(nn.Module):
    """Two layers, of which a step may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.second = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        for layer in (self.first, self.second)[:layers]:
            x = layer(x)
        return x


def cpu_share(way: str, layers: int) -> float:
    """Share of a step's time that this thread computes, while rank 0 comes late to it."""
    model = Halves()
    named = [(f"{way}.{layers}.{name}", p) for name, p in model.named_parameters()]
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=named,
        compression=Compression.topk(named, dense_below=10**9 if way == "dense" else 0),
    )
    share = 1.0
    for late_s in (0.0, 0.0, LATE_S):  # the first step connects, the second compares weights
        optimizer.zero_grad()
        time.sleep(late_s if hvd.rank() == 0 else 0.0)
        model(torch.ones(1, 40), layers).sum().backward()
        began_at, worked_at = time.perf_counter(), time.thread_time()
        if way == "synchronize":
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        waited_s = time.perf_counter() - began_at
        share = (time.thread_time() - worked_at) / waited_s
    if hvd.rank() == 1:
        assert waited_s > LATE_S / 2, waited_s  # else there was nothing to wait for
    return share


def cpu_shares() -> list[float]:
    """The shares of every way to wait."""
    return [cpu_share(way, n) for way in ("dense", "step", "synchronize") for n in (2, 1)]


@pytest.mark.slow
@with_ranks(World(2))
def test_a_rank_that_waits_leaves_its_processor_alone(ranks: Ranks) -> None:
    """Horovod's own wait takes all of one: a share of 1."""
    shares = ranks.run(cpu_shares)[1].result
    assert len(shares) == 6
    assert max(shares) < 0.3, shares


TIMEOUT_S = 2.0


def busy_between_two_compressions() -> None:
    """Rank 1 waits in one step for what rank 0 begins late; rank 0 for what comes in the other."""
    steps = []
    for number in range(2):
        model = Halves()
        named = [(f"two.{number}.{name}", p) for name, p in model.named_parameters()]
        compression = Compression.topk(named, dense_below=100, timeout_s=TIMEOUT_S)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        steps.append(
            (model, hvd.DistributedOptimizer(inner, named, compression=compression), compression)
        )
    for is_last in (False, False, True):
        for number, (model, optimizer, _) in enumerate(steps):
            optimizer.zero_grad()
            layers = 1 if is_last and number and hvd.rank() == 1 else 2
            model(torch.ones(1, 40), layers).sum().backward()
        time.sleep(3 * TIMEOUT_S if is_last and hvd.rank() == 0 else 0.0)
        for _, optimizer, _ in steps:
            optimizer.step()
    for *_, compression in steps:
        compression.close()


@pytest.mark.slow
@with_ranks(World(2))
def test_who_waits_in_one_step_may_owe_something_in_another(ranks: Ranks) -> None:
    ranks.run(busy_between_two_compressions)
