"""What cannot give right gradients is refused by name, and no rank hangs."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse
from tests.launch import horovodrun
from tests.ranks import Ranks, World, with_ranks


def attempt(op: Any, compression: hvd_sparse.adapter.SparseCompressor | None = None) -> str:
    model = nn.Linear(40, 30)
    compression = compression or hvd_sparse.Compression.topk(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=op,
    )
    try:
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
    except (hvd_sparse.UnsupportedError, hvd_sparse.ConfigError) as error:
        return str(error)
    return "nothing was refused"


def refuse_operations() -> None:
    for name in ("Min", "Max", "Product", "Adasum"):
        message = attempt(getattr(hvd, name))
        assert f"hvd.{name} cannot be applied" in message, message
        print(f"REFUSED {message}")


def refuse_a_second_optimizer() -> None:
    first = nn.Linear(40, 30)
    compression = hvd_sparse.Compression.topk()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), lr=0.1), compression=compression
    )
    first(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    message = attempt(hvd.Average, compression)
    assert "one optimizer" in message, message
    print(f"REFUSED second optimizer: {message}")
    hvd.barrier()


def train_with_a_stranger() -> None:
    model = nn.Linear(60, 50)
    named = [(f"stranger.{name}", p) for name, p in model.named_parameters()]
    compression = hvd_sparse.Compression.topk(named[:1])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=named,
        compression=compression,
    )
    told = r"gradient of 'stranger.bias', of shape \(50,\), belongs to none of the 1 named_param"
    with pytest.warns(UserWarning, match=told):
        model(torch.ones(2, 60)).sum().backward()
    optimizer.step()
    compression.close()


def join_in_the_middle() -> None:
    model = nn.Linear(40, 30)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvd_sparse.Compression.topk(model.named_parameters(), timeout_s=60.0),
    )
    for _ in range(2 if hvd.rank() == 1 else 4):
        model.zero_grad()
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
    hvd.join()


@with_ranks(World(2))
def test_what_cannot_work_is_refused_by_name(ranks: Ranks) -> None:
    for rank in ranks.run(refuse_operations):
        for op in ("Min", "Max", "Product", "Adasum"):
            assert f"REFUSED op=hvd.{op} " in rank.output
    ranks.run(refuse_a_second_optimizer)


@with_ranks(World(2, "gloo"))
def test_a_parameter_that_the_compression_was_not_given_is_named(ranks: Ranks) -> None:
    ranks.run(train_with_a_stranger)


@pytest.mark.launches
def test_join_is_refused_and_no_rank_hangs() -> None:
    done = horovodrun(3, join_in_the_middle, timeout=90, check=False)
    assert done.returncode != 0
    assert "hvd.join() cannot be used" in done.stdout + done.stderr
