"""What cannot give right gradients is refused by name, and no rank hangs."""

from __future__ import annotations

import gc
import warnings
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


def replace_a_parameter() -> None:
    """As where a vocabulary grows: Horovod goes on with the old one."""
    model = nn.Linear(40, 30)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=[(f"replaced.{name}", p) for name, p in model.named_parameters()],
        compression=hvd_sparse.Compression.topk(),
    )
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    model.weight = nn.Parameter(torch.ones(30, 40))
    optimizer.param_groups[0]["params"][0] = model.weight
    with pytest.raises(hvd_sparse.UnsupportedError, match=r"one of shape \(30, 40\)"):
        model(torch.ones(2, 40)).sum().backward()


def train_folds(compression: hvd_sparse.adapter.SparseCompressor) -> list[str]:
    """One compression for several trainings of one model, whose weights begin anew in each."""
    model = nn.Linear(60, 50)
    named = [(f"fold.{name}", p) for name, p in model.named_parameters()]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for fold in range(2):
            model.reset_parameters()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                named_parameters=named,
                compression=compression,
            )
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            before = model.weight.detach().clone()
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.ones(2, 60)).sum() * (fold == 0)).backward()
                optimizer.step()
            assert fold == 0 or torch.equal(model.weight, before)
            del optimizer
            gc.collect()
    compression.close()
    return [str(each.message) for each in told]


def residuals_of_other_weights() -> None:
    told = train_folds(hvd_sparse.Compression.topk(density=0.02, dense_below=100))
    assert sum("the weights of a new optimizer are not those" in each for each in told) == 1


def join_in_the_middle(steps: str) -> None:
    model = nn.Linear(40, 30)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvd_sparse.Compression.topk(model.named_parameters(), timeout_s=60.0),
    )
    for _ in range(int(steps) if hvd.rank() == 1 else 4):
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
    ranks.run(replace_a_parameter)


@with_ranks(World(2))
def test_residuals_are_not_for_weights_that_begin_anew(ranks: Ranks) -> None:
    ranks.run(residuals_of_other_weights)


@with_ranks(World(2, "gloo"))
def test_a_parameter_that_the_compression_was_not_given_is_named(ranks: Ranks) -> None:
    ranks.run(train_with_a_stranger)


@pytest.mark.launches
@pytest.mark.parametrize("steps", ["1", "2"])  # the others compare their weights in the second one
def test_join_is_refused_and_no_rank_hangs(steps: str) -> None:
    done = horovodrun(3, join_in_the_middle, steps, timeout=90, check=False)
    assert done.returncode != 0
    assert "hvd.join() cannot be used" in done.stdout + done.stderr
