"""TopkA from device to device: with a stand-in for NCCL whose devices are threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import Reduction
from hvd_sparse.collectives.topk_allgather import TopkAllgather, room_for
from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import MessageError, TransportError
from hvd_sparse.methods import METHODS
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.transports.nccl import NcclTransport
from hvd_sparse.wire import WIRES
from tests.streams import dense
from tests.transports.test_nccl import over_nccl

pytestmark = pytest.mark.timeout(60)

NUMEL, K = 1000, 300
COUNTS = [7, 0, 300, 1, 12]
"""Entries of each rank's stream."""
WORLDS = pytest.mark.parametrize("P", [1, 2, 3, 4])
HEADER_BYTES = 8


def stream_of(rank: int, step: int, nnz: int, numel: int = NUMEL) -> SparseStream:
    """Whole numbers, of which sums are exact; none of them is zero."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    indices = torch.randperm(numel, generator=generator)[:nnz].sort().values.int()
    values = torch.randint(1, 100, (nnz,), generator=generator)
    signs = torch.randint(0, 2, (nnz,), generator=generator) * 2 - 1
    return SparseStream(indices, (values * signs).float(), numel)


def sums(transport: Transport) -> list[tuple[Tensor, Tensor]]:
    collective = TopkAllgather(transport, NUMEL, K)
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + transport.rank)
        given = stream_of(transport.rank, step, COUNTS[(transport.rank + step) % len(COUNTS)])
        values = torch.randn(given.nnz, generator=generator)
        reduction = collective.reduce(SparseStream(given.indices, values, NUMEL))
        assert reduction.returned.nnz == 0
        stream = reduction.reduced.as_stream()
        found.append((stream.indices.clone(), stream.values.clone()))
    return found


def recorded(transport: Transport) -> Mock:
    """The calls by which a transport gathers from now on."""
    gathered = Mock(wraps=transport.allgather_on_devices)
    transport.allgather_on_devices = gathered  # type: ignore[method-assign]
    return gathered


def rooms(gathered: Mock) -> list[int]:
    """Entries that each message had room for."""
    return [(call.args[0].numel() - HEADER_BYTES) // 8 for call in gathered.call_args_list]


def reductions(
    counts: Sequence[Sequence[int]], k: int, numel: int = NUMEL
) -> Callable[[NcclTransport], tuple[list[int], list[tuple[SparseStream, Reduction]]]]:
    """What each rank does where it has `counts[step][rank]` entries: rooms, and what came of it."""

    def rank(transport: NcclTransport) -> tuple[list[int], list[tuple[SparseStream, Reduction]]]:
        gathered, collective = recorded(transport), TopkAllgather(transport, numel, k)
        found = []
        for step, nnz in enumerate(counts):
            given = stream_of(transport.rank, step, nnz[transport.rank % len(nnz)], numel)
            found.append((given, collective.reduce(given)))
        assert gathered.call_count == len(counts), "more than one exchange in a step"
        return rooms(gathered), found

    return rank


def check(
    ranks: list[tuple[list[int], list[tuple[SparseStream, Reduction]]]],
) -> None:
    """The law of mass, exactly; and the same rooms and the same bits on all ranks."""
    assert all(rooms == ranks[0][0] for rooms, _ in ranks)
    for step in zip(*(found for _, found in ranks), strict=True):
        _, first = step[0]
        given = torch.stack([dense(stream) for stream, _ in step]).sum(0)
        kept = torch.stack([dense(reduction.returned) for _, reduction in step]).sum(0)
        assert torch.equal(dense(first.reduced.as_stream()) + kept, given)
        for _, reduction in step:
            mine, theirs = reduction.reduced.as_stream(), first.reduced.as_stream()
            assert torch.equal(mine.indices, theirs.indices)
            assert torch.equal(mine.values.view(torch.int32), theirs.values.view(torch.int32))


@WORLDS
def test_the_bits_are_those_of_the_host(P: int) -> None:
    def on_devices(transport: NcclTransport) -> list[tuple[Tensor, Tensor]]:
        before, handles = transport.traffic.snapshot(), transport._calls
        gathered = recorded(transport)
        found = sums(transport)
        assert transport._calls == handles, "a message went through the host"
        assert gathered.call_count == 4
        assert (transport.traffic.since(before).bytes_sent > 0) == (P > 1)
        return found

    expected = run_ranks(P, sums)
    for ours, theirs in zip(over_nccl(P, on_devices), expected, strict=True):
        for (indices, values), (their_indices, their_values) in zip(ours, theirs, strict=True):
            assert torch.equal(indices, their_indices)
            assert torch.equal(values.view(torch.int32), their_values.view(torch.int32))


@WORLDS
@pytest.mark.parametrize(
    ("numel", "k", "counts"),
    [
        (NUMEL, 10, [[0], [0]]),
        (NUMEL, 0, [[0], [3, 0], [0]]),
        (NUMEL, 10, [[10, 0], [0, 10], [0, 1]]),
        (1, 1, [[1], [0, 1], [0], [1, 0]]),
        (1, 0, [[1], [0], [1]]),
        (0, 0, [[0], [0]]),
        (50, 50, [[50], [50, 49]]),
    ],
    ids=str,
)
def test_awkward_sizes(P: int, numel: int, k: int, counts: list[list[int]]) -> None:
    ranks = over_nccl(P, reductions(counts, k, numel))
    check(ranks)
    assert all(reduction.returned.nnz == 0 for _, found in ranks for _, reduction in found)


@WORLDS
def test_the_room_follows_the_longest_stream(P: int) -> None:
    """In the step after; it never falls below that of k."""
    longest = [10, 80, 200, 700, 5, 10]
    counts = [[5] * (P - 1) + [most] for most in longest]
    ranks = over_nccl(P, reductions(counts, k=10))
    check(ranks)
    wanted = [10, *(max(10, most) for most in longest[:-1])]
    assert ranks[0][0] == [room_for(entries, NUMEL) for entries in wanted]


@pytest.mark.parametrize("k", [0, 1, 10, 250, 1000])
def test_there_is_room_for_all_that_a_selector_takes_which_keeps_to_k(k: int) -> None:
    assert min(NUMEL, round(1.1 * k)) <= room_for(k, NUMEL) <= NUMEL


@WORLDS
def test_what_there_is_no_room_for_comes_back(P: int) -> None:
    """The smallest of a stream; nothing is lost, and the ranks agree."""
    counts = [[900, 3], [0, 1000], [1000]]
    ranks = over_nccl(P, reductions(counts, k=10))
    check(ranks)
    room = room_for(10, NUMEL)
    given, reduction = ranks[0][1][0]
    assert reduction.returned.nnz == 900 - room
    threshold = float(given.values.abs().topk(room).values[-1])
    assert float(reduction.returned.values.abs().max()) <= threshold
    assert bool((reduction.returned.indices.diff() > 0).all())


def test_what_is_not_finite_is_told_though_there_is_no_room_for_all() -> None:
    """Were it handed back, the ranks would not learn that the step does not count."""

    def rank(transport: NcclTransport) -> bool:
        given = stream_of(transport.rank, 0, 900)
        given.values[-1] = math.nan if transport.rank == 1 else 1.0
        reduction = TopkAllgather(transport, NUMEL, 10).reduce(given)
        assert reduction.returned.isfinite()
        return reduction.reduced.as_stream().isfinite()

    assert over_nccl(3, rank) == [False] * 3


def test_a_message_is_sent_from_memory_that_is_kept() -> None:
    def rank(transport: NcclTransport) -> list[int]:
        gathered, collective = recorded(transport), TopkAllgather(transport, NUMEL, 10)
        for step, nnz in enumerate((10, 300, 10, 3, 8)):
            collective.reduce(stream_of(transport.rank, step, nnz))
        return [call.args[0].data_ptr() for call in gathered.call_args_list]

    for first, second, *others in over_nccl(2, rank):
        assert first == second  # whose room was reckoned before it
        assert len(set(others)) == 1


def test_a_state_goes_on_with_the_same_room() -> None:
    def rank(transport: NcclTransport) -> list[int]:
        collective, other = (TopkAllgather(transport, NUMEL, k) for k in (10, 600))
        collective.aim(20)
        collective.reduce(stream_of(transport.rank, 0, 300 + transport.rank))
        state = collective.state_dict()
        collective.reduce(stream_of(transport.rank, 1, 700))
        collective.load_state_dict(state)
        other.load_state_dict(state)
        other.aim(20)
        gathered, found = recorded(transport), []
        for each in (collective, other):
            reduction = each.reduce(stream_of(transport.rank, 2, 500))
            found.append((*reduction.reduced.as_stream().payload(), *reduction.returned.payload()))
        assert all(map(torch.equal, *found))
        collective.aim(700)
        collective.reduce(stream_of(transport.rank, 3, 1))
        assert collective.state_dict() == {"step": 3, "longest": 1}
        return rooms(gathered)

    expected = [room_for(entries, NUMEL) for entries in (302, 302, 700)]
    assert over_nccl(3, rank) == [expected] * 3


def test_a_step_that_does_not_count_leaves_the_room_as_it_was() -> None:
    def rank(transport: NcclTransport) -> list[int]:
        method = METHODS["hard_threshold"](
            threshold=0.5, density=0.02, collective="topk_allgather"
        ).make()
        engine, gathered = Engine(method), recorded(transport)
        engine.connect(transport)
        for step, counts in enumerate((True, False, True, True)):
            engine.scale = 1.0
            gradient = torch.zeros(NUMEL)
            gradient[: (30, 78, 60, 40)[step]] = 1.0
            engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), gradient)
            engine.result("w")
            engine.settle(() if counts else engine.residuals.changed)
        engine.disconnect()
        return rooms(gathered)

    expected = [room_for(entries, NUMEL) for entries in (20, 30, 30, 60)]
    assert over_nccl(2, rank) == [expected] * 2


def test_in_the_place_of_another_collective_all_that_may_be_sent_has_room() -> None:
    """In a warm-up. What stands in has no state, so no step before may change what it sends."""

    def rank(transport: NcclTransport) -> list[int]:
        method = METHODS["hard_threshold"](threshold=0.5, density=0.1, collective="gtopk").make()
        engine, gathered = Engine(method), recorded(transport)
        engine.connect(transport)
        for nnz in (390, 20, 400, 390):
            engine.scale = 1.0
            gradient = torch.zeros(NUMEL)
            gradient[:nnz] = 1.0
            engine.submit(TensorSpec("w", (NUMEL,), "torch.float32"), gradient)
            assert torch.equal(engine.result("w"), 2 * gradient)
            engine.settle()
        assert engine.stats().buckets[0].collective == "topk_allgather"
        engine.disconnect()
        return rooms(gathered)

    assert over_nccl(2, rank) == [[room_for(400, NUMEL)] * 4] * 2


@pytest.mark.parametrize("count", [-1, 76, 2**31 - 1])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    def rank(transport: NcclTransport) -> None:
        gather = transport.allgather_on_devices

        def damaged(sent: Tensor, header_bytes: int) -> tuple[Tensor, Tensor]:
            arrived, headers = gather(sent, header_bytes)
            headers.view(torch.int32)[1, 0] = count
            return arrived, headers

        transport.allgather_on_devices = damaged  # type: ignore[method-assign]
        with pytest.raises(MessageError, match=rf"rank 1 claims {count} entries"):
            TopkAllgather(transport, NUMEL, 10).reduce(stream_of(transport.rank, 0, 5))

    over_nccl(2, rank)


def test_another_wire_is_for_the_host() -> None:
    def rank(transport: NcclTransport) -> Any:
        return TopkAllgather(transport, NUMEL, 10, wire=WIRES["float16+gap"]).reads_on(
            torch.device("cpu")
        )

    assert over_nccl(2, rank) == [False, False]


def trained(connected: Callable[..., list[Any]], arguments: dict[str, Any]) -> list[list[Tensor]]:
    def rank(transport: Transport) -> list[Tensor]:
        engine = Engine(METHODS["topk"](density=0.02, bucket_numel=600, **arguments).make())
        engine.connect(transport)
        engine.scale = 0.5
        found, gathered = [], recorded(transport)
        for step in range(5):
            generator = torch.Generator().manual_seed(100 * step + transport.rank)
            for name, shape in {"a": (30, 40), "b": (257,)}.items():
                gradient = torch.randn(shape, generator=generator)
                engine.submit(TensorSpec(name, shape, "torch.float32"), gradient)
            found += [engine.result(name).clone() for name in ("a", "b")]
            engine.settle()
        # Two buckets, in each step.
        assert gathered.call_count == (10 if isinstance(transport, NcclTransport) else 0)
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


@WORLDS
@pytest.mark.parametrize("arguments", [{}, {"momentum": 0.5, "momentum_kind": "local"}], ids=str)
def test_a_training_whose_streams_outgrow_the_room_keeps_its_law(
    P: int, arguments: dict[str, Any]
) -> None:
    """What came back is in the residual, and every rank has the same result."""

    def rank(transport: NcclTransport) -> list[tuple[Tensor, Tensor, Tensor]]:
        method = METHODS["hard_threshold"](
            threshold=50.0, density=0.05, collective="topk_allgather", **arguments
        ).make()
        engine, gathered, found = Engine(method), recorded(transport), []
        engine.connect(transport)
        for step in range(4):
            engine.scale = 1.0
            gradient = dense(stream_of(transport.rank, step, 1200, 4000)).float()
            engine.submit(TensorSpec("w", (4000,), "torch.float32"), gradient.clone())
            result = engine.result("w").clone()
            engine.settle()
            found.append((gradient, result, engine.state_dict()["residual"]["w"].clone()))
        history = engine.stats().buckets[0].history
        taken = [step.nnz_selected for step in history]
        engine.disconnect()
        assert taken[0] > rooms(gathered)[0] == room_for(200, 4000)
        assert taken[-1] <= rooms(gathered)[-1]
        return found

    total = torch.zeros(4000)
    for step in zip(*over_nccl(P, rank), strict=True):
        assert all(torch.equal(result, step[0][1]) for _, result, _ in step)
        total += torch.stack([gradient for gradient, _, _ in step]).sum(0) - step[0][1]
        if not arguments:
            assert torch.equal(total, torch.stack([residual for *_, residual in step]).sum(0))


def test_a_rank_that_does_not_come_is_told_by_all() -> None:
    def rank(transport: NcclTransport) -> str:
        if transport.rank == 2:
            return ""
        with pytest.raises(TransportError) as caught:
            sums(transport)
        return str(caught.value)

    says = over_nccl(3, rank, timeout_s=1.0)
    assert all("it has waited" in each or "gave the transport up" in each for each in says[:2])
