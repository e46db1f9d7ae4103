"""`sparse_allreduce` among Horovod's ranks, and embedding gradients that take its path."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvd_sparse


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
