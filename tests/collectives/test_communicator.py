"""Sparse vectors of users: kinds, types, operations, blocks, handles, mistakes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hvd_sparse import functional
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from hvd_sparse.errors import (
    ConfigError,
    PeerLostError,
    PlanError,
    TransportError,
    UnsupportedError,
)
from hvd_sparse.functional.communicator import ALGORITHMS, Communicator
from hvd_sparse.leaving import PROCESS_END
from hvd_sparse.streams import Operation, SparseStream
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.transports.local import LocalWorld

PRODUCT = Operation("product", torch.mul, lambda dtype: 1)
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}
NEUTRAL = {"sum": 0, "max": -(2**31), "min": 2**31 - 1, "product": 1}


def sparse_tensor(
    rank: int, dtype: torch.dtype, shape: tuple[int, ...], sparse_dim: int, nnz: int
) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    places = torch.stack(
        [torch.randint(size, (nnz,), generator=generator) for size in shape[:sparse_dim]]
    )
    places = torch.unique(places, dim=1)
    values = torch.randint(-3, 4, (places.shape[1], *shape[sparse_dim:]), generator=generator)
    return torch.sparse_coo_tensor(places, values.to(dtype), shape).coalesce()


def filled(x: Tensor, neutral: float) -> Tensor:
    """Dense, with another number than 0 where there is no entry."""
    out = torch.full(x.shape, neutral, dtype=torch.float64)
    out[tuple(x.indices())] = x.values().double()
    return out


def run(world_size: int, fn: Callable[[Communicator], object]) -> list[object]:
    def worker(transport: Transport) -> object:
        communicator = Communicator(transport)
        try:
            return fn(communicator)
        finally:
            communicator.close()

    return run_ranks(world_size, worker, timeout_s=20.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_operations_types_and_shapes(algorithm: str, world_size: int) -> None:
    cases = [
        (op, dtype, shape, sparse_dim, nnz)
        for op in REDUCE
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
        for shape, sparse_dim, nnz in (
            ((500,), 1, 20),
            ((60,), 1, 40),
            ((40, 3), 1, 5),
            ((20, 30), 2, 25),
        )
    ]

    def worker(communicator: Communicator) -> list[Tensor]:
        rank = communicator.transport.rank
        handles = [
            communicator.allreduce_async(
                sparse_tensor(rank, dtype, shape, sparse_dim, nnz),
                algorithm=algorithm,
                op=PRODUCT if op == "product" else op,
            )
            for op, dtype, shape, sparse_dim, nnz in cases
        ]
        return [handle.wait() for handle in handles]

    ranks = run(world_size, worker)
    for i, (op, dtype, shape, sparse_dim, nnz) in enumerate(cases):
        brought = [
            filled(sparse_tensor(rank, dtype, shape, sparse_dim, nnz), NEUTRAL[op])
            for rank in range(world_size)
        ]
        for results in ranks:
            result = results[i]
            assert (result.dtype, tuple(result.shape)) == (dtype, shape)
            assert result.is_coalesced()
            expected = REDUCE[op](torch.stack(brought))
            assert torch.equal(filled(result, NEUTRAL[op]), expected), (op, dtype, shape)
            assert torch.equal(result.indices(), ranks[0][i].indices())


def test_streams_and_gathering() -> None:
    def worker(communicator: Communicator) -> tuple[SparseStream, list[SparseStream]]:
        rank = communicator.transport.rank
        stream = SparseStream(
            torch.tensor([rank, 9], dtype=torch.int32), torch.tensor([1.0, 2.0]), 10
        )
        total = communicator.allreduce_async(stream)
        everyone = communicator.allgather_async(stream)
        return total.wait(), everyone.wait()

    for total, everyone in run(3, worker):
        assert total.indices.tolist() == [0, 1, 2, 9]
        assert total.values.tolist() == [1.0, 1.0, 1.0, 6.0]
        assert [stream.indices.tolist() for stream in everyone] == [[0, 9], [1, 9], [2, 9]]


def test_a_lossy_wire_tells_what_it_lost() -> None:
    def worker(communicator: Communicator) -> tuple[SparseStream, SparseStream]:
        generator = torch.Generator().manual_seed(communicator.transport.rank)
        indices = torch.randperm(1000, generator=generator)[:300].sort().values.int()
        stream = SparseStream(indices, torch.randn(300, generator=generator), 1000)
        handle = communicator.allreduce_async(stream, wire="qsgd4+gap")
        exact = communicator.allreduce_async(stream).wait()
        lost = handle.lost()
        assert lost is not None
        assert lost.nnz > 0
        return handle.wait(), lost, exact

    ranks = run(3, worker)
    total = torch.zeros(1000, dtype=torch.float64)
    for stream in (ranks[0][0], *(lost for _, lost, _ in ranks)):
        total[stream.indices.long()] += stream.values.double()
    exact = torch.zeros(1000, dtype=torch.float64)
    exact[ranks[0][2].indices.long()] = ranks[0][2].values.double()
    torch.testing.assert_close(total, exact, rtol=0, atol=1e-5)


def test_duplicates_are_added_first() -> None:
    def worker(communicator: Communicator) -> Tensor:
        x = torch.sparse_coo_tensor([[2, 2, 0]], [1.0, 2.0, 5.0], (4,))
        return communicator.allreduce_async(x).wait()

    for result in run(2, worker):
        assert result.to_dense().tolist() == [10.0, 0.0, 6.0, 0.0]


def test_mistakes_are_named() -> None:
    def worker(communicator: Communicator) -> None:
        x = sparse_tensor(0, torch.float32, (50,), 1, 5)
        with pytest.raises(TypeError, match="or a sparse COO tensor, got torch"):
            communicator.allreduce_async(torch.zeros(3))
        with pytest.raises(ConfigError, match="algorithm must be one of auto"):
            communicator.allreduce_async(x, algorithm="ring")
        with pytest.raises(ConfigError, match="op must be one of sum, max, min; got 'mean'"):
            communicator.allreduce_async(x, op="mean")
        for places, message in (([3, 3], "ascending"), ([-1, 2], "in .0, 10"), ([1], "1 values")):
            stream = SparseStream(torch.tensor(places).int(), torch.ones(2), 10)
            with pytest.raises(ValueError, match=message):
                communicator.allreduce_async(stream)
        with pytest.raises(UnsupportedError, match="float16"):
            communicator.allreduce_async(x.half())
        with pytest.raises(UnsupportedError, match="got op 'max' on torch"):
            communicator.allreduce_async(x, op="max", wire="qsgd8")
        whole = torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.long), torch.ones(1, 3), (3,))
        with pytest.raises(UnsupportedError, match="must have a sparse dimension, got none"):
            communicator.allreduce_async(whole)

    run(1, worker)


def test_ranks_that_make_different_calls_are_told() -> None:
    def worker(communicator: Communicator) -> None:
        op = "sum" if communicator.transport.rank else "max"
        x = sparse_tensor(0, torch.float32, (50,), 1, 5)
        with pytest.raises(PlanError, match="makes another call than this one: allreduce auto"):
            communicator.allreduce_async(x, op=op).wait()

    run(2, worker)


def test_as_many_elements_are_not_yet_the_same_shape() -> None:
    def worker(communicator: Communicator) -> None:
        shape = (6, 2) if communicator.transport.rank else (2, 6)
        x = torch.sparse_coo_tensor([[1], [1]], [1.0], shape, check_invariants=True)
        with pytest.raises(PlanError, match=r"this one: allreduce .* of shape \([26], [26]\)"):
            communicator.allreduce_async(x).wait()

    run(2, worker)


def test_a_connection_lives_as_long_as_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many process sets have one: a rank that connects anew alone waits in vain."""
    from horovod.torch import mpi_ops

    monkeypatch.setattr(
        functional, "_connected", lambda _: Communicator(LocalWorld(1).transport(0))
    )
    every = [functional.communicator_of(process_set) for process_set in range(20)]
    assert [functional.communicator_of(process_set) for process_set in range(20)] == every
    of_all = functional.communicator_of(mpi_ops.global_process_set)
    assert functional.communicator_of() is of_all
    monkeypatch.setattr(PROCESS_END, "life", object())  # as hvd.shutdown() does
    assert functional.communicator_of(0) is not every[0]


def test_a_call_after_the_end_is_an_error() -> None:
    """As one in a handler at exit is: nobody would execute it."""

    def worker(communicator: Communicator) -> None:
        communicator.close()
        with pytest.raises(TransportError, match="the communicator has ended"):
            communicator.allreduce_async(sparse_tensor(0, torch.float32, (50,), 1, 5))

    run(1, worker)


def test_calls_overlap() -> None:
    """The first one ends only after the second one has: each rank's sum waits for that."""
    second_world = LocalWorld(2, 20.0)
    made: list[int] = []

    def worker(transport: Transport) -> list[list[float]]:
        rank, ended = transport.rank, threading.Event()

        def second() -> Transport:
            made.append(rank)
            return second_world.transport(rank)

        def add_late(a: Tensor, b: Tensor) -> Tensor:
            assert ended.wait(20.0)
            return a + b

        late = Operation("late sum", add_late, lambda dtype: 0)
        communicator = Communicator(transport, second)
        x = sparse_tensor(rank, torch.float64, (4,), 1, 9)
        alone = [communicator.allreduce_async(x, overlaps=False).wait() for _ in range(3)]
        assert rank not in made
        first = communicator.allreduce_async(x, op=late)
        other = communicator.allreduce_async(x)
        alone.append(other.wait())
        assert not first.done()
        ended.set()
        alone.append(first.wait())
        alone += [h.wait() for h in [communicator.allreduce_async(x) for _ in range(5)]]
        communicator.close()
        return [each.to_dense().tolist() for each in alone]

    for results in run_ranks(2, worker, timeout_s=20.0):
        assert results == [results[0]] * 10
    assert sorted(made) == [0, 1]


def test_who_leaves_first_does_not_end_what_the_others_are_at() -> None:
    """All are at the last exchange of a training, and one rank has what it needs of it."""
    gone = threading.Event()

    def worker(transport: Transport) -> list[int]:
        embeddings = EmbeddingExchange([], "auto")
        embeddings.connect(transport)
        if transport.rank == 2:
            embeddings.disconnect()
            gone.set()
            return []
        assert gone.wait(20.0)
        other, mine = 1 - transport.rank, torch.tensor([transport.rank], dtype=torch.uint8)
        theirs = transport.exchange((mine,), other, other, channel="last").received()
        embeddings.disconnect()
        return theirs.tolist()

    assert run_ranks(3, worker, timeout_s=20.0) == [[1], [0], []]


def test_a_call_that_is_given_up_ends_on_the_peers_too() -> None:
    def worker(transport: Transport) -> None:
        if transport.rank == 0:
            communicator = Communicator(transport)
            handle = communicator.allreduce_async(sparse_tensor(0, torch.float64, (4,), 1, 9))
            communicator.abandon()
            with pytest.raises(PeerLostError, match="rank 0 aborted the transport"):
                handle.wait()
        elif transport.rank == 1:
            with pytest.raises(PeerLostError, match="rank 0 gave up"):
                transport.exchange(None, None, 2, channel="never").received()

    run_ranks(3, worker, timeout_s=20.0)
