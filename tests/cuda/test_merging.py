"""Every collective on a device gives the host's bits; how often a step waits and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives.registry import ALGORITHMS, BY_NAME
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.selectors import ExactTopK
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.wire import WIRES
from tests.cuda.pretended import CUDA, Present, Pretended
from tests.laws.buckets import bucket_of, step_of
from tests.ops.cases import assert_same, generator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

Device = Pretended | Present
NUMEL, K, STEPS = 6000, 300, 4
COSTS = {
    "dense": (5, 3, 1),
    "topk_allgather": (4, 5, 2),
    "ssar_recursive_double": (4, 5, 2),
    "ssar_split_allgather": (5, 7, 6),
    "dsar_split_allgather": (6, 6, 5),
    "gtopk": (10, 13, 5),
    "oktopk": (6, 8, 3),
    "spardl": (13, 17, 7),
    "index_union": (8, 6, 5),
    "exdyna": (7, 7, 7),
    "clt_k": (5, 3, 5),
}
"""Of a step of the first of two ranks: waits of the host, copies to the host, copies from it."""


def steps_of_rank(
    transport: Transport,
    make: Callable[[], Device] | None,
    name: str,
    wire: str = "float32",
    memory: MemoryOptions = MemoryOptions(),  # noqa: B008
    numel: int = NUMEL,
    k: int = K,
) -> tuple[list[Any], Counter[str]]:
    """What each step came to, with the residual; and what the last one cost the host."""
    device = make() if make is not None else None
    place = torch.device("cpu") if device is None else CUDA
    collective = partial(BY_NAME[name].collective, wire=WIRES[wire])

    def train() -> list[Any]:
        bucket = bucket_of(transport, numel, k, ExactTopK, collective, memory, place)
        random, found = generator(transport.rank), list[Any]()
        gradient = torch.zeros(numel).to(place)  # one, as its address is kept
        for _ in range(STEPS):
            gradient.copy_(torch.randn(numel, generator=random))
            if device is not None:
                device.counts.clear()
            taken, reduction = step_of(bucket, [gradient])
            assert bucket.reduced is not None
            bucket.reduced.write(bucket.decoded, 0.5)
            told = [taken.payload(), reduction.reduced.as_stream().payload()]
            found.append([*map(on_host, told), on_host(reduction.returned.payload())])
            found.append(on_host([bucket.memory.residual, bucket.decoded]))
        return found

    if device is None:
        return train(), Counter()
    with device:
        found = train()
        return found, device.counts


def on_host(tensors: Any) -> list[Tensor]:
    with torch._C.DisableTorchFunction():
        return [x.as_subclass(Tensor).cpu().clone() for x in tensors]


def same_as_on_the_host(
    world_size: int, one_device: Callable[[], Device], **parts: Any
) -> list[Counter[str]]:
    """What the last step cost each rank on the device."""
    step = partial(steps_of_rank, **parts)
    host = run_ranks(world_size, partial(step, make=None), timeout_s=60)
    there = run_ranks(world_size, partial(step, make=one_device), timeout_s=200)
    for (ours, _), (theirs, _) in zip(there, host, strict=True):
        assert_same(ours, theirs)
    return [counts for _, counts in there]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", [entry.name for entry in ALGORITHMS])
def test_the_bits_are_the_hosts(
    name: str, world_size: int, one_device: Callable[[], Device]
) -> None:
    ranks = same_as_on_the_host(world_size, one_device, name=name)
    assert not any(counts["pageable"] for counts in ranks)
    first = ranks[0]
    cost = (first["waits"], first["copies to host"], first["copies to device"])
    assert world_size > 2 or not first or cost == COSTS[name]


@pytest.mark.parametrize("wire", ["float16", "qsgd4+gap"])
@pytest.mark.parametrize(
    "name", ["topk_allgather", "oktopk", "gtopk", "dsar_split_allgather", "index_union"]
)
def test_what_rounding_loses_is_the_hosts(
    name: str, wire: str, one_device: Callable[[], Device]
) -> None:
    same_as_on_the_host(3, one_device, name=name, wire=wire)


@pytest.mark.parametrize(
    "memory", [MemoryOptions(0.9, nesterov=True), MemoryOptions(0.9, momentum_kind="local")]
)
def test_momentum_is_the_hosts(memory: MemoryOptions, one_device: Callable[[], Device]) -> None:
    same_as_on_the_host(2, one_device, name="oktopk", memory=memory)


def test_a_dense_step_crosses_as_values_alone(one_device: Callable[[], Device]) -> None:
    """4 bytes an element each way, not the 8 of an entry."""
    [first, _] = same_as_on_the_host(2, one_device, name="dense", k=NUMEL)
    for way in ("to host", "to device"):
        assert not first or 4 * NUMEL <= first[f"bytes {way}"] < 4.1 * NUMEL
