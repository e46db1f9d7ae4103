"""A parameter of the optimizer that the compression was not given."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse


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
