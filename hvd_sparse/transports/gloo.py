"""Messages over a gloo group of torch.distributed that only this package uses.

Gloo has no bounds of its own here, so this transport finds gloo's sockets (`Sockets`): the system
ends a connection whose other end is out of reach for `timeout_s`, counts its bytes for the watch,
and takes no connection for gloo once the ranks are connected. A stranger's would cost a descriptor
for good, and gloo ends the process when there is none left.

A send whose connection breaks while gloo's thread begins to write it never ends, whatever is
closed. So other threads wait for the sends. A failure lets go whoever waits for them, and leaves
these threads and the group to themselves.

Gloo accepts a message shorter than the posted buffer, but ends the whole process on a longer one.
The tags (see `framing`) keep a message from meeting a buffer shorter than its capacity.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import queue
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from hvd_sparse.errors import PeerLostError, TransportError, TransportTimeout, logger
from hvd_sparse.leaving import keep_forever
from hvd_sparse.transports.lines import KEEPALIVE_S, keep_alive
from hvd_sparse.transports.meeting import MeetingStore, dist
from hvd_sparse.transports.point_to_point import PointToPointTransport, Request
from hvd_sparse.transports.transport import start_thread

_ABORT_TAG = (1 << 31) - 1  # above the tags of all messages
_SHORTEST_WAIT = timedelta(milliseconds=1)  # gloo takes 0 for its own default
LONGEST_WAIT = timedelta(days=3650)

CONNECTING_S = 5.0
"""Connecting may take at least this long: on a busy host, ranks begin seconds apart."""


SPARE = 16
"""Descriptors that gloo may need beside one for each peer."""

GRACE_S = 1.0
"""At its end, a transport waits this long for its sends to end too."""


class GlooTransport(PointToPointTransport):
    """One rank of a gloo group; `host` is the IPv4 address where the others reach it.

    Raises:
        TransportError: Not all ranks connected within the timeout, or within `CONNECTING_S` where
            that is longer.
    """

    name = "gloo"
    _group: Any = None
    _sockets: Sockets | None = None

    def __init__(
        self, rank: int, world_size: int, meeting: MeetingStore, *, host: str, timeout_s: float
    ) -> None:
        super().__init__(rank, world_size, timeout_s)
        self.host = host
        self._store = meeting  # torch holds its C++ part only, and would call what is gone
        self.unsent: set[_Send] = set()
        self._sends: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._senders: list[threading.Thread] = []
        weakref.finalize(self, _end_senders, self._sends, self._senders).atexit = False
        try:
            _reserve(world_size + SPARE)
            # The group's options have no public name in torch.
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=max(timeout_s, CONNECTING_S))
            options._threads = 1
            options._devices = [_device(host)]
            self._group = dist.ProcessGroupGloo(meeting, rank, world_size, options)
            self._sockets = Sockets(meeting, host, timeout_s)
            if len(self._sockets.connected) < world_size - 1:
                logger.warning(
                    "rank %d does not know gloo's sockets of torch %s: what the network drops ends "
                    "waits only by busy_timeout_s, and strangers' connections stay",
                    rank,
                    torch.__version__,
                )
        except (RuntimeError, OSError) as error:
            raise TransportError(
                f"rank {rank} could not connect the {world_size} ranks over {host}: {error}"
            ) from error

    @override
    def close(self) -> None:
        if self._open:
            self.abort()
        super().close()
        group, self._group = self._group, None
        _end_senders(self._sends, self._senders)
        until = time.monotonic() + GRACE_S
        for sender in self._senders:
            if sender is threading.current_thread():
                continue  # in which this was collected
            sender.join(max(0.0, until - time.monotonic()))
            if sender.is_alive():
                keep_forever(group)  # its sends have not ended; nobody touches it again

    @override
    def disown(self) -> None:
        """`Leaving.disown`; the connections end with the parent, whatever its children do."""
        super().disown()
        self._senders = []
        if self._sockets is not None:
            self._sockets.disown()

    @override
    def bytes_moved(self) -> int | None:
        sockets = self._sockets
        if sockets is None or len(sockets.connected) < self.world_size - 1:
            return None
        return sockets.bytes_moved()

    def _isend(self, peer: int, message: torch.Tensor, tag: int) -> Request:
        try:
            send = _Send(self, peer, self._group.send([message], peer, tag))
        except RuntimeError as error:
            raise self.error_of(error, peer) from error
        self.unsent.add(send)
        self._sends.put(send)
        if len(self.unsent) > len(self._senders):
            self._senders.append(start_thread("hvd_sparse sends", _wait_for_sends, self._sends))
        if self.failure is not None:  # its end may have passed over this one
            send.let_go()
        return send

    def _irecv(self, peer: int, capacity: int, tag: int) -> Request:
        buffer = self._buffers.take(capacity)
        try:
            return _Receive(self, peer, buffer, self._group.recv([buffer], peer, tag))
        except RuntimeError as error:
            raise self.error_of(error, peer) from error

    def _abort_connections(self) -> None:
        # ProcessGroupGloo.abort leaves pending waits alone. A receive that times out closes all
        # connections of its group: the peers see them closed, and so do this rank's other waits.
        group = self._group
        if group is None:
            return
        for peer in range(self.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    scratch = torch.empty(1, dtype=torch.uint8, device="cpu")
                    group.recv([scratch], peer, _ABORT_TAG).wait(_SHORTEST_WAIT)
        for send in list(self.unsent):
            send.let_go()

    def error_of(self, error: RuntimeError, peer: int) -> TransportError:
        """What a failure in gloo means; only its text tells failures apart."""
        reason = str(error).partition("\n")[0].partition(". This is typically")[0]
        if "imed out" in reason:
            return TransportTimeout(
                f"rank {self.rank}: rank {peer} did not answer within {self.timeout_s:g} s"
            )
        return PeerLostError(f"rank {self.rank} lost the connection to rank {peer}: {reason}")


@dataclass(eq=False, slots=True)
class _Receive:
    """One of gloo's receives, and its buffer."""

    _transport: GlooTransport
    _peer: int
    _buffer: torch.Tensor
    _work: Any

    def wait(self, deadline: float) -> torch.Tensor:
        remaining = LONGEST_WAIT
        if deadline != math.inf:
            remaining = max(timedelta(seconds=deadline - time.monotonic()), _SHORTEST_WAIT)
        try:
            self._work.wait(remaining)
        except RuntimeError as error:
            raise self._transport.error_of(error, self._peer) from error
        return self._buffer


@dataclass(eq=False, slots=True)
class _Send:
    """One of gloo's sends, which holds the message; `_held` until it has ended."""

    _transport: GlooTransport
    _peer: int
    work: Any
    error: RuntimeError | None = None
    _held: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._held.acquire()

    def wait(self, deadline: float) -> None:
        transport = self._transport
        remaining_s = max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
        in_time = self._held.acquire(timeout=remaining_s)
        if transport.failure is not None:
            raise PeerLostError(f"rank {transport.rank}: {transport.failure}")
        if not in_time or self.error is not None:
            error = self.error or RuntimeError("timed out")
            raise transport.error_of(error, self._peer) from error

    def let_go(self) -> None:
        """Ends the wait; the send has ended, or the transport has failed."""
        self._transport.unsent.discard(self)
        with contextlib.suppress(RuntimeError):  # it was let go already
            self._held.release()


def _wait_for_sends(sends: queue.SimpleQueue[_Send | None]) -> None:
    """Waits for sends; holds nothing between two, so that a transport can be collected."""
    while (send := sends.get()) is not None:
        try:
            send.work.wait(LONGEST_WAIT)
        except RuntimeError as error:
            send.error = error
        send.let_go()
        del send


def _end_senders(sends: queue.SimpleQueue[_Send | None], senders: list[threading.Thread]) -> None:
    for _ in senders:
        sends.put(None)


def _reserve(descriptors: int) -> None:
    """Raises `OSError` unless so many can be opened: gloo ends the process where one is missing."""
    with contextlib.ExitStack() as opened:
        for _ in range(descriptors):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


# -- gloo's sockets --------------------------------------------------------------------------------

_SO_ATTACH_FILTER = 26
_TAKE_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0), 8)
"""A classic BPF program of one instruction: return 0, the bytes of a packet that are kept."""

_BYTES_AT = 120
"""In `struct tcp_info`: the bytes that were acknowledged, and then those that were received."""

_SOCKADDR = re.compile(
    re.escape(struct.pack("=H", socket.AF_INET)) + rb"(..)(....)\0{8}", re.DOTALL
)
"""A `sockaddr_in`: the port, the address, and padding."""


def take_nothing(end: socket.socket) -> None:
    """Lets the system drop whatever comes for a socket from now on."""
    program = struct.pack("HP", 1, ctypes.addressof(_TAKE_NOTHING))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


class Sockets:
    """The sockets of a connected gloo group, which takes no more connections from here on.

    They are known by gloo's addresses, which the ranks have told each other as `sockaddr_in`. A
    connection whose other end is out of reach for `timeout_s` ends.
    """

    def __init__(self, meeting: MeetingStore, host: str, timeout_s: float) -> None:
        mine, all_ends = _ends_in(meeting.own.values()), _ends_in(meeting.entries.values())
        self.connected: dict[int, os.stat_result] = {}
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                with _borrowed(descriptor) as end:
                    here = end.getsockname()
                    if here in mine and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        take_nothing(end)
                    elif here in mine or (here[0] == host and end.getpeername() in all_ends):
                        user_timeout_ms = math.ceil(1000 * timeout_s)
                        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
                        keep_alive(end, max(1, min(KEEPALIVE_S, int(timeout_s / 4))))
                        self.connected[descriptor] = os.fstat(descriptor)
            except (OSError, LookupError):  # no socket, or one of another kind
                continue

    def disown(self) -> None:
        """Puts something else in the place of a forked child's copies, which gloo still knows."""
        with contextlib.suppress(OSError), open(os.devnull, "rb") as nothing:
            for descriptor, opened in self.connected.items():
                with contextlib.suppress(OSError):  # gloo has closed it
                    if os.path.samestat(os.fstat(descriptor), opened):
                        os.dup2(nothing.fileno(), descriptor, inheritable=False)

    def bytes_moved(self) -> int:
        """The bytes that have come, and those of which the other ends have said that they came."""
        moved = 0
        for descriptor in self.connected:
            with contextlib.suppress(OSError, struct.error), _borrowed(descriptor) as end:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_AT + 16)
                moved += sum(struct.unpack_from("QQ", info, _BYTES_AT))
        return moved


def _ends_in(texts: Iterable[bytes]) -> set[tuple[str, int]]:
    """The IPv4 addresses and ports in what gloo tells."""
    return {
        (socket.inet_ntoa(address), int.from_bytes(port, "big"))
        for text in texts
        for port, address in _SOCKADDR.findall(text)
    }


def _device(host: str) -> Any:
    """Connects at once, not when first used: the store is of no use later."""
    create: Any = dist.ProcessGroupGloo.create_device
    try:
        return create(hostname=host, lazy_init=False)
    except TypeError:  # before torch 2.8 there was no choice
        return create(hostname=host)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object of a descriptor that another owns; raises `OSError` where it is no socket."""
    # Of another type: `socket.setdefaulttimeout` would make its owner's calls non-blocking, too.
    borrowed = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
