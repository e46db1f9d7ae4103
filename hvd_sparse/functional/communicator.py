"""SparCML's collectives on sparse vectors that users bring, without any compressor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.checks import check_choice
from hvd_sparse.collectives import registry
from hvd_sparse.collectives.automatic import cheapest_algorithm
from hvd_sparse.collectives.sparcml import PartsAllreduce, SparcmlCollective
from hvd_sparse.errors import PlanError, TransportError, UnsupportedError
from hvd_sparse.leaving import PROCESS_END, Leaving
from hvd_sparse.streams import OPERATIONS, SUM, Operation, Part, SparseStream, join
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json, start_thread
from hvd_sparse.wire import PLAIN, WIRES, Packer, PlainWire, Wire

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
MAX_NUMEL = 2**31 - 1

SparseVector: TypeAlias = SparseStream | Tensor
"""A stream, or a torch tensor of layout `torch.sparse_coo`."""

Vector = TypeVar("Vector", bound=SparseVector)
Result = TypeVar("Result")

ALGORITHMS: dict[str, PartsAllreduce] = {
    entry.name: entry.collective.combine_parts
    for entry in registry.ALGORITHMS
    if issubclass(entry.collective, SparcmlCollective)
}
"""Allreduces of any operation, by the names under which a user asks for them."""


class Communicator:
    """Sparse collectives over transports that nothing else uses.

    All ranks make the same calls in the same order. A thread executes them, so that the caller can
    continue meanwhile. With a second transport, successive calls alternate between the two, and
    overlap: one computes while the other is on the wire.

    Args:
        transport: Carries the messages.
        second: Makes another transport between the same ranks, at the second call that may overlap
            another; collective. None: calls wait in line.
    """

    def __init__(self, transport: Transport, second: Callable[[], Transport] | None = None) -> None:
        self.transport = transport
        self._queues = [CallQueue(transport)]
        self._second = second
        self._calls = self._overlapping = 0

    def allreduce_async(
        self,
        x: Vector,
        *,
        algorithm: str = "auto",
        op: str | Operation = "sum",
        wire: str | Wire = "float32",
        overlaps: bool = True,
    ) -> SparseHandle[Vector]:
        """Start to combine the ranks' vectors; see `sparse_allreduce`.

        A caller that waits at once passes `overlaps=False`.
        """
        check_choice("algorithm", algorithm, ["auto", *ALGORITHMS])
        if isinstance(op, str):
            op = OPERATIONS[check_choice("op", op, OPERATIONS)]
        if isinstance(wire, str):
            wire = WIRES[check_choice("wire", wire, WIRES)]
        part, form = read_vector(x)
        if wire is PLAIN:
            wire = PlainWire(form.dtype, form.block)
        elif form.dtype != torch.float32 or form.block or op is not SUM:
            raise UnsupportedError(
                f"wire {wire.name!r} carries sums of float32 vectors, got op {op.name!r} on {form}"
            )
        return self._start(overlaps, self._allreduce, part, form, algorithm, op, wire)

    def allgather_async(self, x: Vector, *, overlaps: bool = True) -> SparseHandle[list[Vector]]:
        """Start to gather the ranks' vectors; see `sparse_allgather` and `allreduce_async`."""
        return self._start(overlaps, self._allgather, *read_vector(x))

    def close(self) -> None:
        """Finish what was started, and close the transports."""
        for queue in self._queues:
            queue.close()

    def abandon(self) -> None:
        """Close the transports without waiting: calls under way fail, on the peers too."""
        for queue in self._queues:
            queue.abandon()

    def _start(
        self,
        overlaps: bool,
        call: Callable[..., tuple[Result, Any]],
        *arguments: object,
    ) -> SparseHandle[Result]:
        queue = self._queues[0]
        if overlaps:  # all ranks take the same queue
            if self._overlapping == 1 and self._second is not None:
                self._queues.append(CallQueue(self._second()))
            queue = self._queues[self._overlapping % len(self._queues)]
            self._overlapping += 1  # where making a queue fails, this call does not count
        self._calls += 1
        number, threads = self._calls, torch.get_num_threads()

        def task() -> tuple[Result, Any]:
            if torch.get_num_threads() != threads:  # a new thread does not inherit it
                torch.set_num_threads(threads)
            return call(queue.transport, number, *arguments)

        return SparseHandle(queue.submit(task))

    def _allreduce(
        self,
        transport: Transport,
        number: int,
        part: Part,
        form: StreamLayout,
        algorithm: str,
        op: Operation,
        wire: Wire,
    ) -> tuple[Any, Any]:
        k = _agree(transport, part, f"allreduce {algorithm} {op.name} {wire.name} {form}")
        if algorithm == "auto":
            algorithm = cheapest_algorithm(transport, part.numel, k, tuple(ALGORITHMS), wire)
        packer = Packer(wire, transport.rank, number)
        total = join(ALGORITHMS[algorithm](part, transport, packer, op), op)
        lost = None if wire.is_lossless else Part.of(packer.lost(form.numel))
        return form.restore(total, op), None if lost is None else form.restore(lost, SUM)

    def _allgather(
        self, transport: Transport, number: int, part: Part, form: StreamLayout
    ) -> tuple[list[Any], None]:
        del number  # nothing is rounded
        _agree(transport, part, f"allgather {form}")
        wire = PlainWire(form.dtype, form.block)
        messages = transport.allgather(wire.encode(part, 0), channel="sparse_allgather")
        parts = [wire.decode(message, part.start, part.stop) for message in messages]
        return [form.restore(each, SUM) for each in parts], None


def _agree(transport: Transport, part: Part, call: str) -> int:
    """Check that all ranks make the same call; returns the most entries that any rank brings."""
    calls = gather_json(transport, [call, part.nnz], "sparse_call")
    for rank, (theirs, _) in enumerate(calls):
        if theirs != call:
            raise PlanError(f"rank {rank} makes another call than this one: {call}")
    most: int = max(nnz for _, nnz in calls)
    return most


class CallQueue(Leaving):
    """A transport, and the thread that executes calls over it, one by one."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # Not an executor's: Python waits for those before any exit handler, and so for a peer.
        self._thread = start_thread("hvd_sparse.communicator", _execute, self._tasks)
        self._last: Future[Any] | None = None
        PROCESS_END.add(self)
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Execute a call after those submitted before; TransportError where there is no thread."""
        if not self._thread.is_alive():
            raise TransportError("the communicator has ended: the process exits, or is a fork")
        self._last = future = Future[Result]()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """Finish what was started, and close the transport."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.transport.close()

    @override
    def leave(self, error: BaseException | None) -> bool:
        """`Leaving.leave`; without an error, after what was started."""
        if error is not None:
            self.transport.abort(error)
        self.close()
        return False

    def abandon(self) -> None:
        """Close the transport; abort it where a call is under way.

        Otherwise peers may still be in the last call, which needs nothing more from this rank: they
        must not see a failure.
        """
        if self._last is not None and not self._last.done():
            self.transport.abort()
        self.close()


def _execute(tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := tasks.get()) is not None:
        future, task = call
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        del call, future, task


class SparseHandle(Generic[Result]):
    """A call under way."""

    def __init__(self, future: Future[tuple[Result, Any]]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self) -> Result:
        """Wait for the result; may be called again.

        Raises:
            TransportError: A peer is gone or did not answer.
            PlanError: Ranks made different calls.
        """
        return self._future.result()[0]

    def lost(self) -> Any:
        """What rounding on the wire has lost on this rank, as `x` was; None with a lossless wire.

        A rank that keeps error feedback adds it to its next vector. Summed over the ranks, it makes
        up for the whole loss.
        """
        return self._future.result()[1]


@dataclass(frozen=True)
class StreamLayout:
    """What kind of vector a user brought, here a `SparseStream`, to make another one like it.

    `block` is the shape of the values at one index.
    """

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} of {self.numel} elements of shape {self.block}"

    def restore(self, part: Part, operation: Operation) -> SparseVector:
        """A whole vector of the user's kind."""
        return part.to_stream(self.numel, operation)


@dataclass(frozen=True)
class TensorLayout(StreamLayout):
    """A torch tensor with `sparse_dim` sparse dimensions, and dense ones after them."""

    shape: tuple[int, ...]
    sparse_dim: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}, {self.sparse_dim} dimensions of it sparse"

    @override
    def restore(self, part: Part, operation: Operation) -> Tensor:
        sparse = part.to_sparse(operation)
        assert sparse.indices is not None
        rows = torch.unravel_index(sparse.indices.long(), self.shape[: self.sparse_dim])
        return torch.sparse_coo_tensor(
            torch.stack(rows),
            sparse.values,
            self.shape,
            device=self.device,
            check_invariants=False,
            is_coalesced=True,
        )


def read_vector(x: object) -> tuple[Part, StreamLayout]:
    """A user's vector as a part on the CPU, and its layout.

    Raises:
        TypeError: It is neither a stream nor a sparse COO tensor.
        ValueError: A stream's indices do not ascend, or are out of range.
        UnsupportedError: Its values have another type than 32 or 64 bits, it is too long, or no
            dimension of it is sparse.
    """
    if isinstance(x, SparseStream):
        form = StreamLayout(x.numel, x.values.dtype, tuple(x.values.shape[1:]))
        part = Part(_checked_indices(x), x.values.cpu().contiguous(), 0, x.numel)
    elif isinstance(x, Tensor) and x.layout == torch.sparse_coo:
        x = x.detach().coalesce()
        shape = tuple(x.shape)
        if x.sparse_dim() == 0:
            raise UnsupportedError(f"x must have a sparse dimension, got none in shape {shape}")
        sizes = shape[: x.sparse_dim()]
        numel = prod(sizes)
        form = TensorLayout(
            numel, x.dtype, shape[x.sparse_dim() :], shape, x.sparse_dim(), x.device
        )
        strides = torch.tensor(
            [prod(sizes[i + 1 :]) for i in range(len(sizes))], dtype=torch.int64, device="cpu"
        )
        flat = (x.indices().cpu() * strides[:, None]).sum(0)
        part = Part(flat.to(torch.int32), x.values().cpu().contiguous(), 0, numel)
    else:
        given = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a SparseStream or a sparse COO tensor, got {given}")
    if form.dtype not in DTYPES:
        raise UnsupportedError(f"values must be of one of {DTYPES}, got {form.dtype}")
    if form.numel > MAX_NUMEL or 0 in form.block:
        raise UnsupportedError(f"x must have fewer than 2**31 non-empty elements, got {form}")
    return part, form


def _checked_indices(stream: SparseStream) -> Tensor:
    """A stream's indices on the CPU, once they are known to be valid."""
    indices = stream.indices.cpu().contiguous()
    if indices.dtype != torch.int32 or indices.dim() != 1 or stream.values.dim() == 0:
        raise TypeError(f"x.indices must be int32 (nnz,), got {indices.dtype} {indices.shape}")
    if len(indices) != len(stream.values):
        raise ValueError(f"x must have {len(indices)} values, got {len(stream.values)}")
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= stream.numel):
        raise ValueError(f"x.indices must be in [0, {stream.numel})")
    if bool((indices[1:] <= indices[:-1]).any()):
        raise ValueError("x.indices must be strictly ascending")
    return indices
