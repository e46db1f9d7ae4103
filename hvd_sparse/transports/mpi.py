"""Messages over MPI, through mpi4py, on a communicator that only this package uses.

As soon as one rank shuts down, Horovod ends MPI on all ranks, from a thread of its own, even where
a rank is still in its last exchange. MPI first calls back on each rank. There this transport holds
it until the rank has finished (`MpiTransport.hold_finalize`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from hvd_sparse.errors import ConfigError, PeerLostError, TransportError, TransportTimeout
from hvd_sparse.leaving import keep_forever
from hvd_sparse.transports.point_to_point import Exchange, PointToPointTransport, Request
from hvd_sparse.transports.transport import started
from hvd_sparse.transports.waiting import Pauses

SPIN_S = 50e-6
"""Spin this long before sleeping: longer than a small message takes between two cores."""

SPIN_S_PER_BYTE = 1e-9
"""Spin longer for a large message: MPI moves it piece by piece, in the calls of both ends."""

GRACE_S = 1.0
"""MPI's end waits this long for a rank that makes no progress, and a transport's for a call."""

_GROUP_TAG = 7711  # distinguishes this communicator from others made at the same time


def problem_with_mpi(global_rank: int) -> str | None:
    """Why this process, which MPI has started, cannot use it beside Horovod; or None."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: its MPI library is not found
        return f"mpi4py cannot be imported ({error})"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "MPI was started without support for several threads"
    rank = MPI.COMM_WORLD.Get_rank()
    if rank != global_rank:
        return f"mpi4py has rank {rank} where Horovod has rank {global_rank}"
    return None


class MpiTransport(PointToPointTransport):
    """One rank of a group of MPI processes; making it is collective over the group.

    `ranks` are the group's in COMM_WORLD, the same on all of them.

    Raises:
        ConfigError: This process is not one of `ranks`.
        TransportError: MPI has failed, or not all ranks came within `timeout_s`.
    """

    name = "mpi"

    def __init__(self, ranks: Sequence[int], *, timeout_s: float) -> None:
        from mpi4py import MPI

        parent = MPI.COMM_WORLD
        if parent.Get_rank() not in ranks:
            raise ConfigError(f"rank {parent.Get_rank()} is not one of the ranks {list(ranks)}")
        super().__init__(list(ranks).index(parent.Get_rank()), len(ranks), timeout_s)
        self.mpi = MPI
        # Held during each call into MPI, so that MPI's end cannot fall into one.
        self._gate = threading.RLock()
        self._ended = False
        self._finished = 0
        group = parent.group.Incl(list(ranks))
        made = started("hvd_sparse connects MPI", lambda: parent.Create_group(group, _GROUP_TAG))
        try:
            self._comm: Any = made.result(timeout_s)
        except futures.TimeoutError as error:  # its thread is abandoned
            raise TransportTimeout(
                f"MPI did not connect the ranks within {timeout_s:g} s"
            ) from error
        except MPI.Exception as error:
            raise TransportError(f"MPI could not connect the ranks: {error}") from error
        group.Free()
        largest_tag: Any = parent.Get_attr(MPI.TAG_UB)
        self.tag_limit = min(self.tag_limit, largest_tag) & ~1
        # MPI and Python keep what they call at their end; that must not keep this object alive.
        at_end = MPI.Comm.Create_keyval(delete_fn=_call_if_alive)
        MPI.COMM_SELF.Set_attr(at_end, weakref.WeakMethod(self.hold_finalize))

    @override
    def close(self) -> None:
        """Ends this transport; with exchanges pending, aborts.

        The communicators stay until MPI ends: freeing them would race with an end under way.
        """
        if self._open:
            self.abort()
            keep_forever(list(self._open.values()))  # MPI may still write into their buffers
        super().close()
        self.end()

    @override
    def leave(self, error: BaseException | None) -> bool:
        has_failed = super().leave(error)
        self.end()
        return has_failed

    @override
    def disown(self) -> None:
        super().disown()
        self._gate, self._ended = threading.RLock(), True

    def end(self) -> None:
        """Waits for the call into MPI that is under way; none can begin afterwards."""
        held = self._gate.acquire(timeout=GRACE_S)  # that call may never return
        self._ended = True
        if held:
            self._gate.release()

    def call(self, function: Callable[..., Any], *arguments: Any, peer: int) -> Any:
        """Calls into MPI, unless it has ended."""
        with self._gate:
            if self._ended or self.failure is not None:
                raise self.error_of("MPI has ended" if self._ended else self.failure, peer)
            try:
                return function(*arguments)
            except self.mpi.Exception as error:
                raise self.error_of(error, peer) from error

    def hold_finalize(self) -> None:
        """At MPI's end, waits while this rank makes progress with its exchanges, then ends."""
        finished, give_up = self._finished, time.monotonic() + GRACE_S
        while not self._ended and time.monotonic() < give_up:
            time.sleep(0.01)
            if self._finished != finished:
                finished, give_up = self._finished, time.monotonic() + GRACE_S
        if self._open:
            self.fail(PeerLostError(f"rank {self.rank}: Horovod was shut down by a peer"))
        self.end()

    @override
    def forget(self, handle: Exchange) -> None:
        super().forget(handle)
        self._finished += 1

    def _isend(self, peer: int, message: torch.Tensor, tag: int) -> Request:
        buffer = [message.numpy(), self.mpi.BYTE]
        request = self.call(self._comm.Isend, buffer, peer, tag, peer=peer)
        return _Pending(self, peer, message, request, False)

    def _irecv(self, peer: int, capacity: int, tag: int) -> Request:
        message = self._buffers.take(capacity)
        buffer = [message.numpy(), self.mpi.BYTE]
        request = self.call(self._comm.Irecv, buffer, peer, tag, peer=peer)
        return _Pending(self, peer, message, request, True)

    def _abort_connections(self) -> None:
        """Does nothing: MPI cannot close a connection, and the waits here look at `failure`."""

    def error_of(self, error: object, peer: int) -> TransportError:
        return PeerLostError(f"rank {self.rank} cannot reach rank {peer} over MPI: {error}")


@dataclass(eq=False, slots=True)
class _Pending:
    """One of MPI's sends or receives, and its buffer, which must live as long."""

    _transport: MpiTransport
    _peer: int
    _buffer: torch.Tensor
    _request: Any
    _receives: bool

    def wait(self, deadline: float) -> torch.Tensor | None:
        transport = self._transport
        pauses = Pauses(SPIN_S + SPIN_S_PER_BYTE * self._buffer.numel())
        while not transport.call(self._request.Test, peer=self._peer):
            if time.monotonic() >= deadline:
                raise TransportTimeout(
                    f"rank {transport.rank}: rank {self._peer} did not answer within "
                    f"{transport.timeout_s:g} s"
                )
            pauses.pause()
        return self._buffer if self._receives else None


def _call_if_alive(comm: Any, keyval: int, method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:
        alive()
