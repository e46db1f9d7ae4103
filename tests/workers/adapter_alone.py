"""A job of one process, started without horovodrun: compression changes nothing, or works alone."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch
from torch import nn

import hvd_sparse


def train_alone() -> None:
    assert hvd.size() == 1
    model = nn.Linear(40, 30)
    embedding = nn.Embedding(9, 40, sparse=True)
    named = [*model.named_parameters(), *embedding.named_parameters("embedding")]
    compression = hvd_sparse.Compression.oktopk(named, density=0.1)
    compression.exchange_embeddings(named)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.01),
        named_parameters=named,
        compression=compression,
    )
    before = embedding.weight.detach().clone()
    x, losses = torch.randn(64, 40), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x + embedding(torch.arange(64) % 9)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0], losses
    assert bool((embedding.weight != before).any(1).all()), "the embedding did not learn"
    steps = sum(bucket.steps for bucket in compression.stats().buckets)
    assert steps == (30 if os.environ.get("HOROVOD_ELASTIC") == "1" else 0), steps
    assert compression.stats().totals.bytes_sent == 0
    print("TRAINED")
