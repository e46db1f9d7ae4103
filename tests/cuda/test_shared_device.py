"""Ranks whose gradients are on one device train alike."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse
from tests.devices import ON_CUDA
from tests.ranks import Ranks, World, with_ranks


def train_on(device_name: str) -> None:
    device = torch.device(device_name)
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compression = hvd_sparse.Compression.oktopk(
        model.named_parameters(), density=0.05, dense_below=16
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    target = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    losses = []
    for _ in range(60):
        x = torch.randn(32, 64, device=device)
        with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
            loss = (model(x) - x @ target / 8).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0], losses
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    everywhere = hvd.allgather(flat.view(1, -1), name="weights")
    assert all(torch.equal(theirs, flat) for theirs in everywhere)
    assert compression.stats().totals.bytes_sent > 0


@with_ranks(World(2))
@pytest.mark.parametrize("device", ["cpu", *ON_CUDA])
def test_ranks_that_share_a_device(device: str, ranks: Ranks) -> None:
    ranks.run(train_on, device, timeout=240)
