"""Sparse vectors and embedding gradients under horovodrun."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_sparse.adapter.embeddings import EmbeddingExchange
from tests.ranks import Ranks, World, with_ranks
from tests.workers.sparse_vectors import check_embeddings, check_functions


@with_ranks(World(2), World(3))
def test_functions(ranks: Ranks) -> None:
    ranks.run(check_functions)


@with_ranks(World(2), World(3))
def test_embeddings(ranks: Ranks) -> None:
    ranks.run(check_embeddings)


def test_embeddings_that_go_in_the_middle_of_a_step_do_not_end_it() -> None:
    """Torch calls its hooks one after the other, and must find no other ones meanwhile."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    held = [EmbeddingExchange([parameter], "auto")]

    def let_go(*_: object) -> None:
        held.clear()
        gc.collect()

    hooks = [register_optimizer_step_pre_hook(each) for each in (let_go, lambda *_: None)]
    parameter.grad = torch.ones(2)
    try:
        optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert torch.equal(parameter.detach(), -torch.ones(2))
