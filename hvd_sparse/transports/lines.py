"""Lines: kept connections between every two ranks of a transport, for their watches.

They are made while the ranks connect, and nothing listens afterwards. The end of a process is the
end of its lines, and asking a peer takes no new descriptor. A line carries JSON, a text a line.

Both ends of a line prove that they know the token, which went over Horovod and never goes over a
line: the caller sends its rank and an HMAC of the two ranks, the other end the HMAC of the reverse.
Whoever sends anything else is hung up on, and costs a descriptor until the ranks are connected.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvd_sparse.errors import TransportTimeout

LIMIT_BYTES = 64 << 10
"""More that was not read, or not sent, than any message of the watches has."""

STRANGERS = 64
"""Connections that have proven nothing yet; of more, the oldest are hung up on. A rank whose call
is among them calls again."""

AGAIN_S = 0.1
"""From a call that failed to the next one."""

KEEPALIVE_S = 30
"""An idle line is used this often, so that routers between the hosts do not forget it."""

Address = tuple[str, int]
Message = dict[str, Any]

_RANK = struct.Struct("!I")
_PROOF_BYTES = 32
_HELLO_BYTES = _RANK.size + _PROOF_BYTES


class Line:
    """This rank's end of the line to one peer. One thread receives; any thread may send.

    `ended` says in words why nothing more will come, and `ended_at` since when; None while it may.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ended: str | None = None
        self.ended_at = float("inf")
        self._unread, self._unsent = bytearray(), bytearray()
        self._sending = threading.Lock()
        connection.setblocking(False)
        keep_alive(connection, KEEPALIVE_S)

    def send(self, *messages: Message) -> None:
        """Sends messages, and what is left of earlier ones; does not wait, and never raises."""
        with self._sending:
            for message in messages:
                self._unsent += json.dumps(message).encode() + b"\n"
            if not self._unsent or self.ended is not None:
                return
            with suppress(OSError):  # full: sent later; or broken: receiving says so, and why
                del self._unsent[: self.connection.send(self._unsent)]
            if len(self._unsent) > LIMIT_BYTES:
                self.end("it does not read what it is told")

    def receive(self) -> list[Message]:
        """The messages that have come; does not wait, and never raises."""
        try:
            part = self.connection.recv(LIMIT_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            part = b""
        except OSError as error:
            self.end(f"the connection to it was lost ({error.strerror})")
            return []
        *texts, self._unread = (self._unread + part).split(b"\n")
        try:
            messages = [json.loads(text) for text in texts]
        except (ValueError, RecursionError):
            messages = [None]
        if any(not isinstance(m, dict) for m in messages) or len(self._unread) > LIMIT_BYTES:
            self.end("it sent what no rank sends")
            return []
        if not part:
            self.end("its process has ended, or has closed the transport")
        return messages

    def hang_up(self) -> None:
        """Ends the line at both ends; its descriptor stays until `close`."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def end(self, why: str) -> None:
        """Notes why nothing more will come, unless that is known."""
        if self.ended is None:
            self.ended, self.ended_at = why, time.monotonic()

    def close(self) -> None:
        self.end("this rank has closed the transport")
        self.connection.close()


def keep_alive(connection: socket.socket, idle_s: int) -> None:
    """Lets the system look whether an idle connection's other end is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, idle_s)


@dataclass(slots=True)
class _Call:
    """A connection on which the proof of the other end has not come yet; `peer`: called by us."""

    peer: int | None
    wanted_bytes: int
    said: bytes = b""


def connect_lines(
    rank: int, listener: socket.socket, addresses: Mapping[int, Address], token: bytes, for_s: float
) -> dict[int, Line]:
    """Connects this rank to all others, which do the same; each calls those of lower ranks.

    Closes the `listener` where the higher ranks call. Only the ranks know the `token`.

    Raises:
        TransportTimeout: Some did not connect within `for_s`; they are named.
    """
    exchange = _Exchange(rank, listener, addresses, token)
    try:
        return exchange.connect(time.monotonic() + for_s)
    finally:
        exchange.close()


class _Exchange:
    """All calls of one rank while it connects."""

    def __init__(
        self, rank: int, listener: socket.socket, addresses: Mapping[int, Address], token: bytes
    ) -> None:
        self._rank, self._listener, self._addresses = rank, listener, addresses
        self._token = token
        self._calls: dict[socket.socket, _Call] = {}  # in the order of their coming
        self._lines: dict[int, Line] = {}
        self._call_at = dict.fromkeys((peer for peer in addresses if peer < rank), 0.0)
        self._problem = ""
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        self._selector.close()
        for connection in (self._listener, *self._calls):
            connection.close()

    def connect(self, until: float) -> dict[int, Line]:
        while len(self._lines) < len(self._addresses):
            now = time.monotonic()
            if now >= until:
                for line in self._lines.values():
                    line.close()
                missing = sorted(self._addresses.keys() - self._lines.keys())
                raise TransportTimeout(
                    f"ranks {missing[:8]} did not connect to rank {self._rank} in time"
                    + self._problem
                )
            for peer, at in self._call_at.items():
                if now >= at:
                    self._call(peer)
            for key, _ in self._selector.select(min(until - now, AGAIN_S)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._calls:  # else hung up on meanwhile
                    self._go_on(key.fileobj)
        return self._lines

    def _call(self, peer: int) -> None:
        self._call_at[peer] = float("inf")
        try:
            connection = socket.socket()
        except OSError as error:  # no descriptor
            self._problem, self._call_at[peer] = f": {error.strerror}", time.monotonic() + AGAIN_S
            return
        connection.setblocking(False)
        connection.connect_ex(self._addresses[peer])  # sending tells whether it could
        self._calls[connection] = _Call(peer, _PROOF_BYTES)
        self._selector.register(connection, selectors.EVENT_WRITE)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            self._problem = f": {error.strerror}"
            time.sleep(AGAIN_S)  # the listener stays ready, with or without a descriptor
            return
        connection.setblocking(False)
        self._calls[connection] = _Call(None, _HELLO_BYTES)
        self._selector.register(connection, selectors.EVENT_READ)
        strangers = [other for other, call in self._calls.items() if call.peer is None]
        if len(strangers) > STRANGERS:
            self._hang_up(strangers[0])

    def _go_on(self, connection: socket.socket) -> None:
        call = self._calls[connection]
        try:
            if self._selector.get_key(connection).events == selectors.EVENT_WRITE:
                assert call.peer is not None
                connection.send(_RANK.pack(self._rank) + self._proof(self._rank, call.peer))
                self._selector.modify(connection, selectors.EVENT_READ)
                return
            part = connection.recv(call.wanted_bytes - len(call.said))
        except OSError:
            part = b""
        call.said += part
        if not part:
            self._hang_up(connection)
        elif len(call.said) == call.wanted_bytes:
            self._judge(connection, call)

    def _judge(self, connection: socket.socket, call: _Call) -> None:
        """Keeps a connection whose other end has proven who it is."""
        peer = call.peer
        if peer is None:
            (peer,) = _RANK.unpack(call.said[: _RANK.size])
        proof = call.said[-_PROOF_BYTES:]
        is_it = hmac.compare_digest(proof, self._proof(peer, self._rank))
        if not is_it or peer not in self._addresses or (call.peer is None and peer < self._rank):
            self._hang_up(connection)
            return
        if call.peer is None:
            with suppress(OSError):
                connection.send(self._proof(self._rank, peer))
        del self._calls[connection]
        self._selector.unregister(connection)
        before = self._lines.pop(peer, None)  # the peer has called again: it did not hear our proof
        if before is not None:
            before.close()
        self._lines[peer] = Line(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        call = self._calls.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if call.peer is not None:
            self._call_at[call.peer] = time.monotonic() + AGAIN_S

    def _proof(self, of: int, to: int) -> bytes:
        return hmac.digest(self._token, _RANK.pack(of) + _RANK.pack(to), "sha256")
