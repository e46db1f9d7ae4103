"""TopkA from device to device: with a stand-in for NCCL whose devices are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives.topk_allgather import TopkAllgather
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import TransportError
from hvd_sparse.methods import METHODS
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.transports.nccl import NcclTransport
from hvd_sparse.wire import WIRES
from tests.transports.test_nccl import over_nccl

pytestmark = pytest.mark.timeout(60)

NUMEL = 1000
COUNTS = [7, 0, 300, 1, 12]
"""Entries of each rank's stream."""


def stream_of(rank: int, step: int) -> SparseStream:
    generator = torch.Generator().manual_seed(10 * step + rank)
    nnz = COUNTS[(rank + step) % len(COUNTS)]
    indices = torch.randperm(NUMEL, generator=generator)[:nnz].sort().values.int()
    return SparseStream(indices, torch.randn(nnz, generator=generator), NUMEL)


def sums(transport: Transport) -> list[tuple[Tensor, Tensor]]:
    collective = TopkAllgather(transport, NUMEL, 10)
    found = []
    for step in range(4):
        reduction = collective.reduce(stream_of(transport.rank, step))
        assert reduction.returned.nnz == 0
        stream = reduction.reduced.as_stream()
        found.append((stream.indices.clone(), stream.values.clone()))
    return found


@pytest.mark.parametrize("P", [1, 2, 3, 4])
def test_the_bits_are_those_of_the_host(P: int) -> None:
    def on_devices(transport: NcclTransport) -> list[tuple[Tensor, Tensor]]:
        before, handles = transport.traffic.snapshot(), transport._calls
        found = sums(transport)
        assert transport._calls == handles, "a message went through the host"
        assert (transport.traffic.since(before).bytes_sent > 0) == (P > 1)
        return found

    expected = run_ranks(P, sums)
    for ours, theirs in zip(over_nccl(P, on_devices), expected, strict=True):
        for (indices, values), (their_indices, their_values) in zip(ours, theirs, strict=True):
            assert torch.equal(indices, their_indices)
            assert torch.equal(values.view(torch.int32), their_values.view(torch.int32))


def test_nothing_from_anybody() -> None:
    def rank(transport: NcclTransport) -> int:
        empty = SparseStream.empty(NUMEL)
        return int(TopkAllgather(transport, NUMEL, 10).reduce(empty).reduced.nnz)

    assert over_nccl(3, rank) == [0, 0, 0]


def test_another_wire_is_for_the_host() -> None:
    def rank(transport: NcclTransport) -> Any:
        return TopkAllgather(transport, NUMEL, 10, wire=WIRES["float16+gap"]).device

    assert over_nccl(2, rank) == [None, None]


def trained(connected: Callable[..., list[Any]], arguments: dict[str, Any]) -> list[list[Tensor]]:
    def rank(transport: Transport) -> list[Tensor]:
        engine = Engine(METHODS["topk"](density=0.02, bucket_numel=600, **arguments).make())
        engine.connect(transport)
        engine.scale = 0.5
        found, gathered = [], Mock(wraps=transport.allgather_on_devices)
        transport.allgather_on_devices = gathered  # type: ignore[method-assign]
        for step in range(5):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            for name, shape in {"a": (30, 40), "b": (257,)}.items():
                gradient = torch.randn(shape, generator=generator)
                engine.submit(TensorSpec(name, shape, "torch.float32"), gradient)
            found += [engine.result(name).clone() for name in ("a", "b")]
            engine.settle(counts=True)
        # Counts and entries of two buckets, in each step.
        assert gathered.call_count == (20 if isinstance(transport, NcclTransport) else 0)
        kept = engine.state_dict()["residual"]
        engine.disconnect()
        return [*found, kept["a"], kept["b"]]

    return connected(3, rank)


@pytest.mark.parametrize(
    "arguments", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_a_training_is_that_over_the_host(arguments: dict[str, Any]) -> None:
    arguments = {"collective": "topk_allgather", **arguments}
    ours, theirs = (trained(connected, arguments) for connected in (over_nccl, run_ranks))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a_rank_that_does_not_come_is_told_by_all() -> None:
    def rank(transport: NcclTransport) -> str:
        if transport.rank == 2:
            return ""
        with pytest.raises(TransportError) as caught:
            sums(transport)
        return str(caught.value)

    says = over_nccl(3, rank, timeout_s=1.0)
    assert all("it has waited" in each or "gave the transport up" in each for each in says[:2])
