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
    compression = hvd_sparse.Compression.oktopk(model.named_parameters(), density=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    x, losses = torch.randn(64, 40), []
    for _ in range(30):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0], losses
    steps = sum(bucket.steps for bucket in compression.stats().buckets)
    assert steps == (30 if os.environ.get("HOROVOD_ELASTIC") == "1" else 0), steps
    assert compression.stats().totals.bytes_sent == 0
    print("TRAINED")
