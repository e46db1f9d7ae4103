"""Ranks whose weights are no longer the same are told so, with rank, tensor and step."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import hvd_sparse
from hvd_sparse.adapter.divergence import Divergence
from hvd_sparse.transports import Transport, run_ranks
from tests.ranks import Ranks, World, with_ranks


def flip_a_bit() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 40))
    compression = hvd_sparse.Compression.topk(model.named_parameters(), dense_below=16)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    told = []
    for step in range(4):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(8, 40)).square().mean().backward()
            optimizer.step()
        told.append([str(w.message) for w in caught if "other weights" in str(w.message)])
        if step == 0 and hvd.rank() == 1:
            with torch.no_grad():
                model[1].weight.view(-1).view(torch.int32)[77] ^= 1
    compression.close()
    assert [len(words) for words in told] == [0, 0, 1, 0], told  # once it has outlived a step
    assert "rank 1 has other weights than rank 0 in '1.weight'" in told[2][0]
    assert "before step 2:" in told[2][0]


def perturb_within_a_step() -> None:
    """Sharpness-aware training moves each rank's weights by the rank's own gradient, and back."""
    model = nn.Linear(40, 60)
    named = [(f"perturbed.{name}", p) for name, p in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=named,
        compression=hvd_sparse.Compression.topk(named, dense_below=16),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            model.weight.data.add_(0.01 * (1 + hvd.rank()))
            model(torch.ones(8, 40)).square().mean().backward()
            model.weight.data.copy_(before)
            optimizer.step()


def compared(weights: list[torch.Tensor]) -> list[str]:
    """What the ranks find, each with other weights of one tensor."""

    def worker(transport: Transport) -> str:
        parameters = [
            ("first", Parameter(torch.ones(5))),
            ("w", Parameter(weights[transport.rank])),
        ]
        return Divergence(parameters)._compare(transport)

    return run_ranks(len(weights), worker, timeout_s=20.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_first_rank_that_differs_is_named(dtype: torch.dtype) -> None:
    same = torch.randn(33, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert compared([same, same.clone(), same.T.contiguous().T]) == [""] * 3
    flipped = same.clone()
    flipped.view(-1).view(torch.uint8)[-3] ^= 1
    for words in compared([same, same, flipped, flipped]):
        assert "rank 2 has other weights than rank 0 in 'w' and 0 more tensors" in words


@with_ranks(World(2))
def test_weights_may_move_within_a_step(ranks: Ranks) -> None:
    ranks.run(perturb_within_a_step)


@with_ranks(World(2))
def test_a_flipped_bit_is_told_on_every_rank(ranks: Ranks) -> None:
    ranks.run(flip_a_bit)
