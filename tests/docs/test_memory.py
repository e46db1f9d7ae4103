"""The README's table of memory per parameter is what a bucket holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hvd_sparse.engine import TensorSpec
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.engine import exchange
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import LocalWorld

SHAPE = (4, 8, 16, 16)
NUMEL = 4 * 8 * 16 * 16


def tensors_in(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object of this package reaches."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for item in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_in(item, seen)
    elif type(thing).__module__.startswith("hvd_sparse"):
        for item in vars(thing).values() if hasattr(thing, "__dict__") else ():
            yield from tensors_in(item, seen)


def bytes_per_parameter(thing: Any) -> float:
    """Of the tensors as long as the bucket: streams and buffers of messages are O(k)."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_in(thing, set())
        if tensor.numel() == NUMEL
    }
    return sum(storages.values()) / NUMEL


@pytest.mark.parametrize(
    ("dtype", "momentum", "strided", "expected"),
    [
        ("float32", 0.0, False, 8 + 4),
        ("bfloat16", 0.0, False, 8 + 2),
        ("float16", 0.9, False, 8 + 2 + 8),
        ("float32", 0.9, False, 8 + 4 + 8),
        ("float32", 0.0, True, 8 + 4 + 4),
        ("bfloat16", 0.0, True, 8 + 2 + 2),
    ],
)
def test_a_bucket_holds_what_the_readme_says(
    dtype: str, momentum: float, strided: bool, expected: float
) -> None:
    method = METHODS["topk"](momentum=momentum, collective="topk_allgather").make()
    transport = LocalWorld(1).transport(0)
    spec = TensorSpec("weight", SHAPE, f"torch.{dtype}")
    bucket = Bucket([spec], method, transport, torch.device("cpu"))
    gradient = torch.ones(SHAPE, dtype=getattr(torch, dtype))
    if strided:
        gradient = gradient.to(memory_format=torch.channels_last)
    bucket.put(0, gradient)
    exchange(bucket)
    bucket.close_step()
    assert bytes_per_parameter(bucket) == expected
