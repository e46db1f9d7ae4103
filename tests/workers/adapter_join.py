"""Run under horovodrun: rank 1 runs out of data and joins, in the middle of a job of three."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn

import hvd_sparse


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
