"""Transports whose peers can fail: what fails first, on any rank, is what every rank reports.

The first failure is kept: every later call and wait ends with it. Where a `Watch` has been
attached, it tells the peers of the failure, and a rank that lost a connection asks why.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import NoReturn, Protocol

from hvd_sparse.errors import HvdSparseError, PeerLostError, PlanError, TransportError
from hvd_sparse.transports.framing import Awaiting, Call
from hvd_sparse.transports.transport import Transport


class Supervisor(Protocol):
    """What watches the peers of a transport; see `watch.Watch`."""

    def tell(self, kind: str, cause: str) -> None:
        """Tells the peers of the first failure; must not raise, and takes a second at most."""

    def reason_of(self, peer: int) -> tuple[str, str] | str:
        """Why the connection to a peer may be gone: its failure's kind and cause, or words."""

    def close(self) -> None:
        """Ends the watch."""


class SupervisedTransport(Transport):
    """Keeps the first failure, and hands it on.

    Attributes:
        awaited_beside: What this rank waits for without a message, by any key; any thread may
            note something here.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self.failure: HvdSparseError | None = None
        self.awaited_beside: dict[int, Awaiting] = {}
        self._cause = ("", "")
        self._failing = threading.Lock()
        self._watch: Supervisor | None = None

    @abstractmethod
    def _abort_connections(self) -> None:
        """Makes pending waits of this rank fail, and the peers' where it can; must not raise."""

    @abstractmethod
    def awaiting(self) -> Awaiting | None:
        """What this rank waits for; called by another thread."""

    def awaits(self) -> Awaiting | None:
        """What this rank waits for, with a message or without."""
        return next(filter(None, [self.awaiting(), *self.awaited_beside.values()]), None)

    @abstractmethod
    def call_made(self, number: int) -> Call | None:
        """What this rank did in a call; None for one that it has not come to, or forgotten."""

    @abstractmethod
    def calls_made(self) -> int:
        """How many calls this rank has begun."""

    def supervise(self, watch: Supervisor) -> None:
        """Leaves it to a watch to end waits: from now on they have no deadline of their own."""
        self._watch = watch

    @property
    def is_watched(self) -> bool:
        """Whether a watch ends waits for peers that fail."""
        return self._watch is not None

    def deadline_from(self, now: float) -> float:
        """When a wait that begins now gives up by itself; a value of `time.monotonic()`."""
        return now + self.timeout_s if self._watch is None else float("inf")

    def abort(self, reason: object = None) -> None:
        """See `Transport.abort`."""
        kind = PlanError if isinstance(reason, PlanError) else PeerLostError
        because = "no reason was given" if reason is None else _told(reason)
        self.fail(kind(f"rank {self.rank} aborted the transport: {because}"))

    def close(self) -> None:
        """See `Transport.close`."""
        with self._failing:
            if self.failure is None:
                self.failure = TransportError(f"the transport of rank {self.rank} is closed")
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def fail(self, error: HvdSparseError, cause: tuple[str, str] | None = None) -> HvdSparseError:
        """Keeps the first failure for all calls and waits, and tells the peers.

        Args:
            error: What this rank raises.
            cause: Kind and words of the failure of another rank that has led to it.

        Returns:
            The first failure, which may be an earlier one.
        """
        with self._failing:
            if self.failure is not None:
                return self.failure
            kind = "plan" if isinstance(error, PlanError) else "transport"
            self._cause = cause or (kind, str(error))
            self.failure = error
        watch = self._watch
        if watch is not None:
            watch.tell(*self._cause)
        self._abort_connections()
        return error

    def cause(self) -> tuple[str, str] | None:
        """Kind and words of the first failure, where it happened; None where there is none.

        An end in good order is none.
        """
        return None if self.failure is None or not self._cause[0] else self._cause

    def told(self, peer: int, cause: tuple[str, str]) -> HvdSparseError:
        """Fails by the failure of a peer; returns the first failure."""
        kind, words = cause
        error_type = PlanError if kind == "plan" else PeerLostError
        return self.fail(error_type(f"rank {self.rank}: rank {peer} gave up: {words}"), cause)

    def raise_first(self, error: HvdSparseError, peer: int | None, story: str) -> NoReturn:
        """Raises what failed first: `error`, or what has led to it, here or at the peer.

        Args:
            error: What a wait or a call ended with.
            peer: The rank that it was about, or None.
            story: What this rank was at.
        """
        watch = self._watch
        reason: tuple[str, str] | str = ""
        if self.failure is None and watch is not None and peer is not None:
            reason = watch.reason_of(peer) if isinstance(error, PeerLostError) else ""
        if isinstance(reason, tuple):
            assert peer is not None
            failure = self.told(peer, reason)
        else:
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
    if isinstance(reason, HvdSparseError):
        return str(reason)
    return repr(reason) if isinstance(reason, BaseException) else str(reason)
