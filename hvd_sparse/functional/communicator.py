"""SparCML's collectives on sparse vectors that users bring themselves, without any compressor."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from hvd_sparse.checks import check_choice
from hvd_sparse.collectives import registry
from hvd_sparse.collectives.automatic import cheapest_algorithm
from hvd_sparse.collectives.sparcml import PartsAllreduce, SparcmlCollective
from hvd_sparse.errors import PlanError, UnsupportedError
from hvd_sparse.streams import OPERATIONS, SUM, Operation, Part, SparseStream, join
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, WIRES, Packer, PlainWire, Wire

# MERGED functional.user_vector
# The sparse vectors that users bring, as parts and back.

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
MAX_NUMEL = 2**31 - 1

SparseVector: TypeAlias = SparseStream | Tensor
"""A stream, or a torch tensor of layout `torch.sparse_coo`."""


class Form(ABC):
    """What kind of vector a user brought, and how to make another one of it.

    Attributes:
        numel: N, indices that there may be.
        dtype: The values' type.
        block: Shape of what one index stands for.
    """

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]

    @abstractmethod
    def restore(self, part: Part, operation: Operation) -> SparseVector:
        """A whole vector in the user's form."""

    def __str__(self) -> str:
        return f"{self.dtype} of {self.numel} elements of shape {self.block}"


@dataclass(frozen=True)
class StreamForm(Form):
    """A `SparseStream`."""

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]

    def restore(self, part: Part, operation: Operation) -> SparseStream:
        """See `Form.restore`."""
        sparse = part.to_sparse(operation)
        assert sparse.indices is not None
        return SparseStream(sparse.indices, sparse.values, self.numel)


@dataclass(frozen=True)
class TensorForm(Form):
    """A torch tensor with `sparse_dim` sparse dimensions, and dense ones after them."""

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]
    shape: tuple[int, ...]
    sparse_dim: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}, {self.sparse_dim} dimensions of it sparse"

    def restore(self, part: Part, operation: Operation) -> Tensor:
        """See `Form.restore`; coalesced, on the user's device."""
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


def read_vector(x: object) -> tuple[Part, Form]:
    """A user's vector as a part, on the CPU.

    Raises:
        TypeError: It is no stream or sparse COO tensor.
        ValueError: A stream's indices do not ascend, or are out of range.
        UnsupportedError: Its values have another type than 32 or 64 bits, it is too long, or no
            dimension of it is sparse.
    """
    if isinstance(x, SparseStream):
        form: Form = StreamForm(x.numel, x.values.dtype, tuple(x.values.shape[1:]))
        part = Part(_checked_indices(x), x.values.cpu().contiguous(), 0, x.numel)
    elif isinstance(x, Tensor) and x.layout == torch.sparse_coo:
        x = x.detach().coalesce()
        shape = tuple(x.shape)
        if x.sparse_dim() == 0:
            raise UnsupportedError(f"x must have a sparse dimension, got none in shape {shape}")
        sizes = shape[: x.sparse_dim()]
        numel = prod(sizes)
        form = TensorForm(numel, x.dtype, shape[x.sparse_dim() :], shape, x.sparse_dim(), x.device)
        strides = torch.tensor([prod(sizes[i + 1 :]) for i in range(len(sizes))])
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
    """A stream's indices, as they have to be."""
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


Vector = TypeVar("Vector", bound=SparseVector)
Result = TypeVar("Result")

ALGORITHMS: dict[str, PartsAllreduce] = {
    entry.name: entry.collective.combine_parts
    for entry in registry.ALGORITHMS
    if issubclass(entry.collective, SparcmlCollective)
}
"""Allreduces of any operation, by the names under which a user asks for them."""


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What came of a call.

    Attributes:
        result: What it is to return.
        lost: What rounding on the wire has lost and this rank is to add to its next vector, if it
            keeps error feedback; summed over the ranks, it makes up for the whole loss.
    """

    result: Result
    lost: SparseStream | None = None


class SparseHandle(Generic[Result]):
    """A call on its way."""

    def __init__(self, future: Future[Outcome[Result]]) -> None:
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
        return self._future.result().result

    def lost(self) -> SparseStream | None:
        """What rounding has lost on this rank (see `Outcome.lost`); None with a lossless wire."""
        return self._future.result().lost


class Lane:
    """A transport, and the thread that executes calls over it, one by one."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvd_sparse.communicator")
        self._last: Future[Any] | None = None

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Execute a call after those that were submitted before."""
        self._last = future = self._thread.submit(task)
        return future

    def close(self) -> None:
        """Finish what was started, and close the transport."""
        self._thread.shutdown()
        self.transport.close()

    def abandon(self) -> None:
        """Close the transport; abort it where a call is under way.

        Where none is, peers may still be at the last one, which needs nothing more from this rank:
        they are not to hear of a failure.
        """
        if self._last is not None and not self._last.done():
            self.transport.abort()
        self.close()


class Communicator:
    """Sparse collectives over transports that nothing else uses.

    Calls are made in the same order on all ranks; a thread executes them, so that the caller can go
    on meanwhile. With a second transport, calls that follow one another take turns between the two,
    and overlap: one computes while the other is on the wire.

    Args:
        transport: Carries the messages.
        second: Makes another one between the same ranks, at the second call that may overlap
            another; all ranks come to that together. None: there is none, and calls wait in line.
    """

    def __init__(self, transport: Transport, second: Callable[[], Transport] | None = None) -> None:
        self.transport = transport
        self._lanes = [Lane(transport)]
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

        A caller that waits at once says that the call `overlaps` no other one.
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
        for lane in self._lanes:
            lane.close()

    def abandon(self) -> None:
        """Close the transports, and wait for no peer: calls under way fail, on the peers too."""
        for lane in self._lanes:
            lane.abandon()

    def _start(
        self, overlaps: bool, call: Callable[..., Outcome[Result]], *arguments: object
    ) -> SparseHandle[Result]:
        lane = self._next_lane() if overlaps else self._lanes[0]
        self._calls += 1
        number, threads = self._calls, torch.get_num_threads()

        def task() -> Outcome[Result]:
            if torch.get_num_threads() != threads:  # a new thread does not inherit it
                torch.set_num_threads(threads)
            return call(lane.transport, number, *arguments)

        return SparseHandle(lane.submit(task))

    def _next_lane(self) -> Lane:
        """Where the next call that may overlap others goes: the same on all ranks."""
        place = self._overlapping
        if place == 1 and self._second is not None:
            self._lanes.append(Lane(self._second()))
        self._overlapping += 1  # where that fails, this call has not been
        return self._lanes[place % len(self._lanes)]

    def _allreduce(
        self,
        transport: Transport,
        number: int,
        part: Part,
        form: Form,
        algorithm: str,
        op: Operation,
        wire: Wire,
    ) -> Outcome[Any]:
        k = _agree(transport, part, f"allreduce {algorithm} {op.name} {wire.name} {form}")
        if algorithm == "auto":
            algorithm = cheapest_algorithm(transport, part.numel, k, tuple(ALGORITHMS), wire)
        packer = Packer(wire, transport.rank, number)
        total = join(ALGORITHMS[algorithm](part, transport, packer, op), op)
        lost = None if wire.is_lossless else packer.lost(form.numel)
        return Outcome(form.restore(total, op), lost)

    def _allgather(
        self, transport: Transport, number: int, part: Part, form: Form
    ) -> Outcome[list[Any]]:
        del number  # nothing is rounded
        _agree(transport, part, f"allgather {form}")
        wire = PlainWire(form.dtype, form.block)
        messages = transport.allgather(wire.encode(part, 0), channel="sparse_allgather")
        parts = [wire.decode(message, part.start, part.stop) for message in messages]
        return Outcome([form.restore(each, SUM) for each in parts])


def _agree(transport: Transport, part: Part, call: str) -> int:
    """Check that all ranks make the same call; the most entries that any of them brings."""
    mine = torch.tensor([zlib.crc32(call.encode()), part.nnz])
    messages = transport.allgather((mine,), channel="sparse_call")
    calls = torch.stack([message.view(torch.int64) for message in messages])
    for rank, code in enumerate(calls[:, 0].tolist()):
        if code != int(mine[0]):
            raise PlanError(f"rank {rank} makes another call than this one: {call}")
    return int(calls[:, 1].max())
