"""Sparse vectors and embedding gradients under horovodrun."""

from __future__ import annotations

import gc
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hvd_sparse
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from tests.ranks import Ranks, World, with_ranks


def check_functions() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = torch.sparse_coo_tensor([[rank, 50]], [1.0, 2.0], (100,), check_invariants=True)
    total = hvd_sparse.sparse_allreduce(x).to_dense()
    assert total[:size].tolist() == [1.0] * size
    assert total[50] == 2.0 * size

    handles = [hvd_sparse.sparse_allreduce_async(x * n, op="max") for n in range(1, 9)]
    everyone = hvd_sparse.sparse_allgather(x)
    assert [float(y.to_dense()[i]) for i, y in enumerate(everyone)] == [1.0] * size
    assert [float(handle.wait().to_dense()[50]) for handle in handles] == [
        2.0 * n for n in range(1, 9)
    ]


class Tables(nn.Module):
    """Two embeddings, which every rank may use in another order, and a dense layer."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(500, 8, sparse=True)
        self.second = nn.Embedding(40, 8, sparse=True)
        self.out = nn.Linear(8, 1) if dense else None

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(words) + self.second(words % 40)
        return x.sum() if self.out is None else self.out(x).square().mean()


def train(dense: bool, exchange: bool, op: Any, passes: int) -> list[Tensor]:
    """Weights after some steps, with Horovod's way for embeddings or with ours."""
    torch.manual_seed(3)
    model = Tables(dense)
    compression = hvd_sparse.Compression.topk(
        model.named_parameters(), density=1.0, dense_below=1, collective="topk_allgather"
    )
    if exchange:
        compression.exchange_embeddings(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=op,
        backward_passes_per_step=passes,
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    gathered = 0
    for _ in range(5):
        model.zero_grad()
        for _ in range(passes):
            words = torch.randint(0, 500, (64,), generator=generator)
            model(words).backward()
        optimizer.synchronize()
        assert model.first.weight.grad is not None
        assert model.first.weight.grad.is_sparse
        gathered += model.first.weight.grad._nnz()
        with optimizer.skip_synchronize():
            optimizer.step()
    stats = compression.stats()
    assert (stats.embedding_bytes > 0) is exchange
    assert ("embeddings: " in str(stats)) is (exchange and stats.steps > 0)
    compression.close()
    assert gathered > 0
    return [p.detach().clone() for p in model.parameters()]


def check_embeddings() -> None:
    for dense, op, passes in (
        (True, hvd.Average, 1),
        (True, hvd.Sum, 2),
        (False, hvd.Average, 2),
    ):
        theirs = train(dense, False, op, passes)
        ours = train(dense, True, op, passes)
        for p, q in zip(theirs, ours, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-5)
        for number, q in enumerate(ours):
            theirs = hvd.broadcast(q, 0, name=f"weight.{number}")
            assert torch.equal(theirs, q), "ranks have different weights"


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
