"""One bucket of any selector, collective and memory, and its steps as the worker does them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvd_sparse.collectives import Collective, Reduction
from hvd_sparse.collectives.registry import name_of
from hvd_sparse.engine import Method, TensorSpec
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.exchange import reduce, select
from hvd_sparse.engine.staging import Stage, Stages
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.selectors import Selector
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from tests.devices import CPU

PLAIN = MemoryOptions()


class Unchanged(Stages):
    """The bucket's own collective at every density, where others would be cheaper, too.

    What the stages choose is for tests/laws/test_stages.py.
    """

    def _choose(self, k: int) -> Stage:
        return Stage(self._own, name_of(self._own), k)


def bucket_by(
    method: Method, transport: Transport, *numels: int, device: torch.device = CPU
) -> Bucket:
    """A bucket of vectors of so many elements."""
    specs = [TensorSpec(f"w{i}", (numel,), "torch.float32") for i, numel in enumerate(numels)]
    bucket = Bucket(specs, method, transport, device)
    bucket.stages = Unchanged(bucket.collective, bucket.selector)
    return bucket


def bucket_of(
    transport: Transport,
    numel: int,
    k: int,
    selector: Callable[[], Selector],
    collective: Callable[..., Collective],
    memory: MemoryOptions = PLAIN,
    device: torch.device = CPU,
) -> Bucket:
    """A bucket of one vector, of which `k` entries are wanted, made of these parts."""
    density = k / numel if numel else 1.0
    method = Method(density, numel, selector, collective, "parts", memory)
    return bucket_by(method, transport, numel, device=device)


def step_of(bucket: Bucket, gradients: Sequence[Tensor]) -> tuple[SparseStream, Reduction]:
    """What a step has taken, and what came of it; one that fails is taken back."""
    for place, gradient in enumerate(gradients):
        bucket.put(place, gradient)
    try:
        with bucket.lane.work():
            select(bucket)
            taken = bucket.taken
            reduction = reduce(bucket)
    except BaseException:
        bucket.close_step()
        bucket.roll_back()
        raise
    assert taken is not None
    bucket.lane.hand_back()
    bucket.end_exchange()
    bucket.close_step()
    bucket.is_open = False
    return taken, reduction
