"""Ranks as threads of one process: for tests and simulations."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from hvd_sparse.errors import PeerLostError, TransportTimeout
from hvd_sparse.transports.point_to_point import PointToPointTransport, Request

Result = TypeVar("Result")


class _Mailbox:
    """The messages that have arrived for one rank, by sender and tag."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._closed: str | None = None

    def put(self, key: tuple[int, int], message: torch.Tensor) -> None:
        with self._changed:
            self._messages[key].append(message)
            self._changed.notify_all()

    def take(self, key: tuple[int, int], deadline: float) -> torch.Tensor:
        with self._changed:
            remaining_s = deadline - time.monotonic()
            self._changed.wait_for(lambda: self._messages[key] or self._closed, remaining_s)
            queue = self._messages.pop(key)
            if not queue:
                raise (
                    PeerLostError(self._closed)
                    if self._closed
                    else TransportTimeout(f"no message from rank {key[0]} in time")
                )
            message = queue.popleft()
            if queue:
                self._messages[key] = queue
            return message

    def close(self, reason: str) -> None:
        """Lets all pending and future waits fail; messages that have arrived can still be taken."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()


class LocalWorld:
    """`world_size` ranks in one process, whose waits give up after `timeout_s`."""

    def __init__(self, world_size: int, timeout_s: float = 30.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.mailboxes = [_Mailbox() for _ in range(world_size)]

    def transport(self, rank: int) -> LocalTransport:
        """The transport of one rank; each thread takes its own."""
        return LocalTransport(self, rank)

    def transports(self) -> list[LocalTransport]:
        return [self.transport(rank) for rank in range(self.world_size)]

    def abort(self, reason: str) -> None:
        for mailbox in self.mailboxes:
            mailbox.close(reason)


class LocalTransport(PointToPointTransport):
    """One rank of a `LocalWorld`."""

    name = "local"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, world.timeout_s)
        self._world = world

    def _isend(self, peer: int, message: torch.Tensor, tag: int) -> Request:
        self._world.mailboxes[peer].put((self.rank, tag), message)
        return _Request()

    def _irecv(self, peer: int, capacity: int, tag: int) -> Request:
        return _Request(self._world.mailboxes[self.rank], (peer, tag))

    def _abort_connections(self) -> None:
        self._world.abort(f"rank {self.rank} gave up: {self.failure}")


@dataclass(eq=False, slots=True)
class _Request:
    """A receive, or without a mailbox a send: its message lies in the receiver's already."""

    _mailbox: _Mailbox | None = None
    _key: tuple[int, int] = (0, 0)

    def wait(self, deadline: float) -> torch.Tensor | None:
        return None if self._mailbox is None else self._mailbox.take(self._key, deadline)


def run_ranks(
    world_size: int,
    fn: Callable[[LocalTransport], Result],
    timeout_s: float = 30.0,
    *,
    limit_s: float = 600.0,
) -> list[Result]:
    """Runs `fn(transport)` once per rank, each in a thread; returns the ranks' results.

    Waits of a transport give up after `timeout_s`, and the whole run after `limit_s`.

    Raises:
        TransportTimeout: Some ranks were still running after `limit_s`; their threads remain.
        BaseException: What the first rank to fail raised, not the `PeerLostError`s that its failure
            caused on the others.
    """
    world = LocalWorld(world_size, timeout_s)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []  # in the order of their coming
    failure_time: list[float] = []

    def run(transport: LocalTransport) -> None:
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:  # every kind has to reach the caller
            failure_time.append(time.monotonic())
            errors.append(error)
            world.abort(f"rank {transport.rank} failed: {error!r}")

    threads = [
        threading.Thread(target=run, args=(transport,), name=f"rank {rank}", daemon=True)
        for rank, transport in enumerate(world.transports())
    ]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + limit_s
    for thread in threads:
        while thread.is_alive() and time.monotonic() < limit:
            thread.join(0.1)
            if errors:  # no wait of the others can last longer now
                limit = min(limit, failure_time[0] + timeout_s + 1.0)
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLostError)), errors[0])
    if running:
        world.abort(f"the run was over its limit of {limit_s:g} s")
        raise TransportTimeout(f"ranks {running} were still running after {limit_s:g} s")
    return [results[rank] for rank in range(world_size)]
