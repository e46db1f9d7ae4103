"""Trainings of two hosts of two workers, which this machine plays by two names of its own.

adapter_two_levels.py
"""

from __future__ import annotations

import sys
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse.engine.engine import Engine
from tests.workers.asleep import meet
from tests.workers.lean import start_lean

STEPS = 6
WAYS: dict[str, dict[str, Any]] = {
    "average": {"op": hvd.Average},
    "sum": {"op": hvd.Sum},
    "predivide": {"op": hvd.Average, "gradient_predivide_factor": 2.0},
}


def trained(label: str, compression: Any, **arguments: Any) -> tuple[Tensor, Any]:
    """The weights after a few steps, flat, and the compression; for none, Horovod's."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 3))
    named = [(f"{label}.{name}", p) for name, p in model.named_parameters()]
    if isinstance(compression, dict):
        compression = hvd_sparse.Compression.topk(
            named, dense_below=100, bucket_numel=600, timeout_s=60.0, **compression
        )
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=named, compression=compression, **arguments
    )
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), compression


def engine_of(compression: Any) -> Engine:
    engine: Engine = compression._engine
    return engine


def alike(weights: Tensor, label: str) -> None:
    """All ranks have the same bits."""
    every = hvd.allgather(weights.view(1, -1), name=label)
    assert all(torch.equal(each, every[0]) for each in every), label


def main() -> None:
    place = (hvd.local_size(), hvd.cross_size(), hvd.local_rank(), hvd.cross_rank())
    assert place == (2, 2, hvd.rank() % 2, hvd.rank() // 2), place
    for name, arguments in WAYS.items():
        dense, _ = trained(f"{name}.dense", hvd.Compression.none, **arguments)
        options = {"density": 1.0, "hierarchical": True}
        sparse, compression = trained(f"{name}.sparse", options, **arguments)
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-6)
        hosts = engine_of(compression).hosts
        assert hosts is not None
        assert (hosts.grid.hosts, hosts.grid.local_size) == (2, 2)
        alike(sparse, name)
        compression.close()
    weights, compression = trained("sparse", {"density": 0.02, "hierarchical": True})
    alike(weights, "sparse")
    sent, kept = compression.stats().totals.bytes_sent, compression.state_dict()["residual"]
    compression.close()
    _, flat = trained("flat", {"density": 0.02})
    assert sent < flat.stats().totals.bytes_sent / 2
    for tensor in kept.values():
        total = hvd.allreduce(tensor, op=hvd.Sum, name="kept")
        assert total.any()
    flat.close()
    meet("two levels")
    print(f"rank {hvd.rank()}: two levels passed", flush=True)


if __name__ == "__main__":
    hvd.init()
    start_lean()
    main()
    hvd.shutdown()
    sys.exit(0)
