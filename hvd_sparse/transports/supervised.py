"""Transports whose peers can fail: every rank reports what failed first, on whichever rank.

A transport keeps its first failure, and every later call and wait ends with it. An attached `Watch`
tells the peers of the failure. A rank that lost a connection asks its peer why.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, NoReturn, Protocol

from typing_extensions import override

from hvd_sparse.errors import HvdSparseError, PeerLostError, PlanError, TransportError
from hvd_sparse.leaving import PROCESS_END, Leaving, keep_forever
from hvd_sparse.transports.framing import Context
from hvd_sparse.transports.transport import Transport

NUMBER_BITS = 40
"""Bits of a call's number that count; those above them tell the kind of a group (`group`)."""


class Call(NamedTuple):
    """One call of `exchange`, as a rank made it.

    `number` is its place in the sequence of calls, which is the same on all ranks. `sends_up_to`
    and `takes_up_to` are the capacities of the first messages, in bytes, the same at both ends.
    """

    number: int
    channel: str
    context: Context
    dst: int | None
    src: int | None
    sends_up_to: int = 0
    takes_up_to: int = 0

    def __str__(self) -> str:
        return (
            f"call {self.number % (1 << NUMBER_BITS)} on channel {self.channel!r} ({self.context})"
        )


class Awaiting(NamedTuple):
    """What a rank waits for, since a value of `time.monotonic()`.

    `beside` says in words what is no message of a `call`. Unless it `receives`, it waits for room
    for its own message.
    """

    peers: tuple[int, ...]
    since: float
    beside: str = ""
    call: Call | None = None
    receives: bool = True

    @property
    def what(self) -> str:
        if self.call is None:
            return self.beside
        what = "a message from" if self.receives else "room for a message at"
        return f"{what} rank {self.peers[0]} in {self.call}"


class Supervisor(Protocol):
    """The part of a `watch.Watch` that a transport calls; that module imports this one."""

    def tell(self, kind: str, cause: str) -> None: ...
    def reason_of(self, peer: int) -> str: ...
    def close(self) -> None: ...
    def disown(self) -> None: ...


class SupervisedTransport(Leaving, Transport):
    """Keeps the first failure, and hands it on.

    `awaited_beside` has what this rank waits for without a message, under any key, by any thread.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self.failure: HvdSparseError | None = None
        self.awaited: Awaiting | None = None  # the message
        self.awaited_beside: dict[int, Awaiting] = {}
        self._cause = ("", "")
        self._failing = threading.Lock()
        self.watch: Supervisor | None = None  # it ends the waits, which else have deadlines
        PROCESS_END.add(self)

    @override
    def leave(self, error: BaseException | None) -> bool:
        """An engine's transport is closed by then."""
        if error is not None:
            self.abort(error)
        return self.cause() is not None

    @override
    def disown(self) -> None:
        keep_forever(vars(self).copy())
        if self.watch is not None:
            self.watch.disown()
        self._failing, self.watch = threading.Lock(), None
        self.failure = TransportError("the connection is that of the process that forked this one")

    @abstractmethod
    def _abort_connections(self) -> None:
        """Makes this rank's pending waits fail, and the peers' where possible; never raises."""

    def awaits(self) -> Awaiting | None:
        """What this rank waits for, with a message or without; called by another thread."""
        return next(filter(None, [self.awaited, *self.awaited_beside.values()]), None)

    @abstractmethod
    def call_made(self, number: int) -> Call | None:
        """What this rank did in a call; None if it has not come to it, or has forgotten it."""

    @abstractmethod
    def calls_made(self) -> int:
        """How many calls this rank has begun."""

    def bytes_moved(self) -> int | None:
        """How many bytes have come from the peers or reached them; None where nothing tells."""
        return None

    def deadline_from(self, now: float) -> float:
        """When a wait that begins now gives up by itself; a value of `time.monotonic()`."""
        return now + self.timeout_s if self.watch is None else float("inf")

    @override
    def abort(self, reason: object = None) -> None:
        kind = PlanError if isinstance(reason, PlanError) else PeerLostError
        because = "no reason was given" if reason is None else _told(reason)
        self.fail(kind(f"rank {self.rank} aborted the transport: {because}"))

    @override
    def close(self) -> None:
        with self._failing:
            if self.failure is None:
                self.failure = TransportError(f"the transport of rank {self.rank} is closed")
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def fail(self, error: HvdSparseError, cause: tuple[str, str] | None = None) -> HvdSparseError:
        """Keeps the first failure, `error` or an earlier one; tells the peers, and returns it.

        `cause` is the kind and the words of another rank's failure that led to `error`.
        """
        with self._failing:
            if self.failure is not None:
                return self.failure
            kind = "plan" if isinstance(error, PlanError) else "transport"
            self._cause = cause or (kind, str(error))
            self.failure = error
        watch = self.watch
        if watch is not None:
            watch.tell(*self._cause)
        self._abort_connections()
        return error

    def cause(self) -> tuple[str, str] | None:
        """Kind and words of the first failure; None without one. An orderly end is none."""
        return None if self.failure is None or not self._cause[0] else self._cause

    def told(self, peer: int, cause: Iterable[object]) -> HvdSparseError:
        """Fails because a peer failed; returns the first failure."""
        kind, words = map(str, cause)  # it came over the network
        error_type = PlanError if kind == "plan" else PeerLostError
        told = error_type(f"rank {self.rank}: rank {peer} gave up: {words}")
        return self.fail(told, (kind, words))

    def raise_first(self, error: HvdSparseError, peer: int | None, story: str) -> NoReturn:
        """Raises what failed first: `error`, or its cause, here or at the peer it concerns.

        `story` says what this rank was doing.
        """
        watch = self.watch
        reason = ""
        if self.failure is None and watch is not None and peer is not None:
            reason = watch.reason_of(peer) if isinstance(error, PeerLostError) else ""
        if isinstance(error, TransportError):
            error = type(error)("; ".join(filter(None, (str(error), reason, story))))
        failure = self.fail(error)
        if failure is error:
            raise failure
        raise type(failure)(str(failure)) from error  # one object is not raised by two threads

    def _raise_failure(self) -> None:
        failure = self.failure
        if failure is not None:
            raise type(failure)(f"this transport is of no more use: {failure}") from failure


def _told(reason: object) -> str:
    is_other = isinstance(reason, BaseException) and not isinstance(reason, HvdSparseError)
    try:
        return repr(reason) if is_other else str(reason)
    except Exception:  # in the user's code
        return type(reason).__name__
