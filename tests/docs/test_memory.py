"""The table of memory per parameter in docs/usage.md is what a bucket holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hvd_sparse.engine import TensorSpec
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.exchange import reduce, select
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
    ("dtype", "kind", "strided", "expected"),
    [
        ("float32", None, False, 8 + 4),
        ("bfloat16", None, False, 8 + 2),
        ("float16", "local", False, 8 + 2 + 8),
        ("float32", "local", False, 8 + 4 + 8),
        ("float32", "global", False, 8 + 4),
        ("float32", None, True, 8 + 4 + 4),
        ("bfloat16", None, True, 8 + 2 + 2),
    ],
)
def test_a_bucket_holds_what_the_table_says(
    dtype: str, kind: str | None, strided: bool, expected: float
) -> None:
    momentum = {} if kind is None else {"momentum": 0.9, "momentum_kind": kind}
    method = METHODS["topk"](collective="topk_allgather", **momentum).make()
    transport = LocalWorld(1).transport(0)
    spec = TensorSpec("weight", SHAPE, f"torch.{dtype}")
    bucket = Bucket([spec], method, transport, torch.device("cpu"))
    gradient = torch.ones(SHAPE, dtype=getattr(torch, dtype))
    if strided:
        gradient = gradient.to(memory_format=torch.channels_last)
    bucket.put(0, gradient)
    select(bucket)
    reduce(bucket)
    bucket.close_step()
    assert bytes_per_parameter(bucket) == expected
