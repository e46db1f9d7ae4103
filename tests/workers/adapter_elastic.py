"""Run under horovodrun with --min-np 1: rank 1 dies, rank 0 goes on from its last commit."""

from __future__ import annotations

import os

import horovod.torch as hvd
import torch
from torch import nn

import hvd_sparse

STEPS, COMMIT_EVERY, DEATH = 30, 5, 13


def train_through_a_death() -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 30)
    compression = hvd_sparse.Compression.oktopk(
        model.named_parameters(), density=0.02, timeout_s=20.0
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    committed: dict[str, torch.Tensor] = {}

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if hvd.size() == 1:
            restored = compression.state_dict()["residual"]
            assert committed, "nothing was committed"
            assert all(torch.equal(restored[name], committed[name]) for name in committed)
            assert any(value.any() for value in committed.values())
        while state.step < STEPS:
            if state.step == DEATH and hvd.rank() == 1:
                os._exit(1)
            model.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                committed.update(compression.state_dict()["residual"])

    state = hvd.elastic.TorchState(model, optimizer, compression=compression, step=0)
    denser = hvd_sparse.Compression.oktopk(density=0.04)
    state.register_reset_callbacks([lambda: compression.reassign(denser.method)])
    train(state)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert compression.stats().buckets[0].density_target == 0.04
    print(f"RECOVERED world {hvd.size()} step {state.step}", flush=True)
