"""Clipping and frozen layers, as Horovod's optimizer sees them."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse
from tests.ranks import Ranks, World, with_ranks

STEPS = 3


def model_of(label: str) -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5))
    return model, [(f"{label}.{name}", p) for name, p in model.named_parameters()]


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    model(torch.randn(16, 40, generator=generator)).square().sum().backward()


def clip_all_tensors(limit: float, op: str) -> None:
    """Each rank's whole gradient is clipped, whatever goes which way; then it is reduced."""
    model, named = model_of(f"clip.{limit}.{op}")
    compression = hvd_sparse.Compression.topk(
        density=1.0, clip_norm=limit, dense_below=500, bucket_numel=600, timeout_s=60.0
    )
    operation = getattr(hvd, op)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        named_parameters=named,
        compression=compression,
        op=operation,
    )
    scale = 1.0 / hvd.size() if op == "Average" else 1.0
    clipped = 0
    for step in range(STEPS):
        plain, _ = model_of("plain")
        plain.load_state_dict(model.state_dict())
        backward(plain, step)
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        norm = torch.cat([g.reshape(-1) for g in grads]).norm() * scale
        factor = min(1.0, limit / hvd.size() ** 0.5 / float(norm))
        clipped += factor < 1.0
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        for place, ((name, p), gradient) in enumerate(zip(named, grads, strict=True)):
            expected = hvd.allreduce(factor * gradient, op=operation, name=f"{name}.{step}.{place}")
            torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert clipped == (STEPS if limit < 1.0 else 0), clipped
    assert {name for b in compression.stats().buckets for name in b.names} == {n for n, _ in named}
    compression.close()


def freeze_a_layer(kind: str) -> None:
    """Its weights stay where they are, and its residual, until it is thawed or forgotten."""
    model, named = model_of(f"freeze.{kind}")
    optimizer, compression = hvd_sparse.dgc_sgd(
        named, lr=1e-3, momentum_kind=kind, density=0.05, dense_below=100, timeout_s=60.0
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    layer = model[0].weight
    name = named[0][0]

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()

    train(range(5))
    layer.requires_grad_(False)
    weights, residual = layer.detach().clone(), compression.state_dict()["residual"][name]
    assert residual.any()
    train(range(5, 15))
    assert torch.equal(layer, weights)
    assert torch.equal(compression.state_dict()["residual"][name], residual)
    assert compression.stats().waiting_l1 > 0
    layer.requires_grad_(True)
    train(range(15, 17))
    assert not torch.equal(layer, weights)
    assert compression.stats().waiting_l1 == 0
    assert compression.forget([name]) > 0
    assert not compression.state_dict()["residual"][name].any()
    with pytest.raises(hvd_sparse.ConfigError, match="must be those of parameters, got none"):
        compression.forget(["none"])
    compression.close()


@with_ranks(World(2), World(3))
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_clipping_is_over_all_tensors_of_a_rank(ranks: Ranks, op: str) -> None:
    for limit in (0.5, 1e6):
        ranks.run(clip_all_tensors, limit, op)


@with_ranks(World(2))
@pytest.mark.parametrize("kind", ["local", "global"])
def test_a_frozen_layer_stays_where_it_is(ranks: Ranks, kind: str) -> None:
    ranks.run(freeze_a_layer, kind)
