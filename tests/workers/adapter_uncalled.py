"""Constructors that were not called, as compressions of two optimizers."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn

import hvd_sparse


def train_by_defaults() -> list[int]:
    """Give constructors to two optimizers; how many steps were compressed, by optimizer."""
    steps = []
    for turn in ("first", "second"):
        torch.manual_seed(7)
        model = nn.Linear(60, 50)
        named = [(f"uncalled.{turn}.{name}", p) for name, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=named,
            compression=hvd_sparse.Compression.topk,
        )
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(4, 60)).square().mean().backward()
            optimizer.step()
        compression = optimizer._compression
        assert isinstance(compression, type(hvd_sparse.Compression.topk()))
        steps += [bucket.steps for bucket in compression.stats().buckets]
        everyone = hvd.allgather(model.weight.detach()[None], name=f"uncalled.{turn}")
        assert all(torch.equal(everyone[0], other) for other in everyone)
        compression.close()
    return steps
