"""Ranks of one machine as hosts of several workers, over a real transport and shared memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import TransportError
from hvd_sparse.hosts import Grid, Hosts
from hvd_sparse.methods import METHODS
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport

SHAPES = {"large": (70, 1000), "small": (257,)}


def connected(grid: tuple[int, int], timeout_s: float = 60.0, **arguments: Any) -> Engine:
    """An engine on two levels, and memory that has been mapped by all when its first step ends."""
    transport: Any = create_transport("auto", HorovodBootstrap(), timeout_s)
    arguments = {"density": 0.02, "bucket_numel": 600, **arguments}
    engine = Engine(METHODS["oktopk"](**arguments).make())
    engine.connect(transport, Hosts(transport, Grid.regular(*grid, transport.rank)))
    return engine


def gradients_of(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: torch.randint(-99, 100, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }


def reduced(engine: Engine, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, gradient in gradients.items():
        engine.submit(TensorSpec(name, SHAPES[name], "torch.float32"), gradient)
    engine.scale = engine.scale or 1.0
    return {name: engine.result(name).clone() for name in gradients}


def steps(grid: tuple[int, int], count: int) -> list[dict[str, tuple[Any, Any]]]:
    """What each step applied, and what this rank kept after it: arrays by name."""
    engine = connected(grid)
    done = []
    for step in range(count):
        results = reduced(engine, gradients_of(step, hvd.rank()))
        engine.settle(counts=True)
        kept = engine.state_dict()["residual"]
        done.append({name: (results[name].numpy(), kept[name].numpy()) for name in SHAPES})
    engine.disconnect()
    return done


def left_alone() -> str:
    """What a rank raises whose neighbour in the host is gone before it has its gradients."""
    engine = connected((1, 4), timeout_s=20.0)
    reduced(engine, gradients_of(0, hvd.rank()))
    assert "memfd:hvd_sparse" in Path("/proc/self/maps").read_text()
    told = ""
    if hvd.rank() == 3:
        engine.disconnect()
    else:
        try:
            reduced(engine, gradients_of(1, hvd.rank()))
        except TransportError as error:
            told = f"{type(error).__name__}: {error}"
        engine.disconnect()
    del engine
    gc.collect()
    assert "memfd:hvd_sparse" not in Path("/proc/self/maps").read_text()
    return told
