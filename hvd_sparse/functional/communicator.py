"""SparCML's collectives on sparse vectors that users bring themselves, without any compressor."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from hvd_sparse.checks import check_choice
from hvd_sparse.collectives import registry
from hvd_sparse.collectives.automatic import cheapest_algorithm
from hvd_sparse.collectives.sparcml import PartsAllreduce, SparcmlCollective
from hvd_sparse.errors import PlanError, UnsupportedError
from hvd_sparse.functional.user_vector import Form, SparseVector, read_vector
from hvd_sparse.streams import OPERATIONS, SUM, Operation, Part, SparseStream, join
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, WIRES, Packer, PlainWire, Wire

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


class Communicator:
    """Sparse collectives over one transport, which nothing else uses.

    Calls are made in the same order on all ranks; a thread of its own executes them one by one, so
    that the caller can go on meanwhile.

    Args:
        transport: Carries the messages.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._calls = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hvd_sparse.communicator")

    def allreduce_async(
        self,
        x: Vector,
        *,
        algorithm: str = "auto",
        op: str | Operation = "sum",
        wire: str | Wire = "float32",
    ) -> SparseHandle[Vector]:
        """Start to combine the ranks' vectors; see `sparse_allreduce`."""
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
        return self._start(self._allreduce, part, form, algorithm, op, wire)

    def allgather_async(self, x: Vector) -> SparseHandle[list[Vector]]:
        """Start to gather the ranks' vectors; see `sparse_allgather`."""
        return self._start(self._allgather, *read_vector(x))

    def close(self) -> None:
        """Finish what was started, and close the transport."""
        self._worker.shutdown()
        self.transport.close()

    def _start(
        self, call: Callable[..., Outcome[Result]], *arguments: object
    ) -> SparseHandle[Result]:
        threads = torch.get_num_threads()

        def task() -> Outcome[Result]:
            if torch.get_num_threads() != threads:  # a new thread does not inherit it
                torch.set_num_threads(threads)
            return call(*arguments)

        return SparseHandle(self._worker.submit(task))

    def _allreduce(
        self, part: Part, form: Form, algorithm: str, op: Operation, wire: Wire
    ) -> Outcome[Any]:
        k = self._agree(part, f"allreduce {algorithm} {op.name} {wire.name} {form}")
        if algorithm == "auto":
            algorithm = cheapest_algorithm(self.transport, part.numel, k, tuple(ALGORITHMS), wire)
        packer = Packer(wire, self.transport.rank, self._calls)
        total = join(ALGORITHMS[algorithm](part, self.transport, packer, op), op)
        lost = None if wire.is_lossless else packer.lost(form.numel)
        return Outcome(form.restore(total, op), lost)

    def _allgather(self, part: Part, form: Form) -> Outcome[list[Any]]:
        self._agree(part, f"allgather {form}")
        wire = PlainWire(form.dtype, form.block)
        messages = self.transport.allgather(wire.encode(part, 0), channel="sparse_allgather")
        parts = [wire.decode(message, part.start, part.stop) for message in messages]
        return Outcome([form.restore(each, SUM) for each in parts])

    def _agree(self, part: Part, call: str) -> int:
        """Check that all ranks make the same call; the most entries that any of them brings."""
        self._calls += 1
        mine = torch.tensor([zlib.crc32(call.encode()), part.nnz])
        messages = self.transport.allgather((mine,), channel="sparse_call")
        calls = torch.stack([message.view(torch.int64) for message in messages])
        for rank, code in enumerate(calls[:, 0].tolist()):
            if code != int(mine[0]):
                raise PlanError(f"rank {rank} makes another call than this one: {call}")
        return int(calls[:, 1].max())
