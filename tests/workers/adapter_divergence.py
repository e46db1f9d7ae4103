"""A bit of a weight changes on one rank."""

from __future__ import annotations

import warnings

import horovod.torch as hvd
import torch
from torch import nn

import hvd_sparse


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
    assert [len(words) for words in told] == [0, 1, 0, 0], told
    assert "rank 1 has other weights than rank 0 in '1.weight'" in told[1][0]
    assert "before step 1:" in told[1][0]
