"""What cannot give right gradients is refused by name, on every rank."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvd_sparse


def attempt(op: Any, compression: hvd_sparse.adapter.SparseCompressor | None = None) -> str:
    model = nn.Linear(40, 30)
    compression = compression or hvd_sparse.Compression.topk(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=op,
    )
    try:
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
    except (hvd_sparse.UnsupportedError, hvd_sparse.ConfigError) as error:
        return str(error)
    return "nothing was refused"


def refuse_operations() -> None:
    for name in ("Min", "Max", "Product", "Adasum"):
        message = attempt(getattr(hvd, name))
        assert f"hvd.{name} cannot be applied" in message, message
        print(f"REFUSED {message}")


def refuse_a_second_optimizer() -> None:
    first = nn.Linear(40, 30)
    compression = hvd_sparse.Compression.topk()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), lr=0.1), compression=compression
    )
    first(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    message = attempt(hvd.Average, compression)
    assert "one optimizer" in message, message
    print(f"REFUSED second optimizer: {message}")
    hvd.barrier()
