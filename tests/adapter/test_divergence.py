"""Ranks whose weights are no longer the same are told so, with rank, tensor and step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from hvd_sparse.adapter.divergence import Divergence
from hvd_sparse.transports import Transport, run_ranks
from tests.ranks import Ranks, World, with_ranks
from tests.workers.adapter_divergence import flip_a_bit


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
def test_a_flipped_bit_is_told_on_every_rank(ranks: Ranks) -> None:
    ranks.run(flip_a_bit)
