"""Short questions and answers over TCP, many at once on one thread.

A question is a token and a line of JSON; an answer is a line of JSON. Each question has its own
connection. Without the right token there is no answer.
"""

from __future__ import annotations

import errno
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

TOKEN_BYTES = 16
LIMIT_BYTES = 16 << 10
"""The longest question or answer."""

INCOMING = 1024
"""Connections served at once; others are closed."""

INCOMING_S = 5.0
"""A question may take this long to arrive."""

Address = tuple[str, int]
Message = dict[str, Any]
Heard = Callable[[Message | None, bool], None]
"""Called with the answer (None: none will come) and whether the connection was refused."""


class Questions:
    """Connections that `serve` looks after; one thread calls it.

    Args:
        token: A secret that both ends know.
        listener: Where questions arrive, or None; this object owns it from now on.
        answer: Makes the answer to a question.
    """

    def __init__(
        self,
        token: bytes,
        listener: socket.socket | None = None,
        answer: Callable[[Message], Message] | None = None,
    ) -> None:
        self._token = token
        self._answer = answer
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._incoming: dict[socket.socket, tuple[bytearray, float]] = {}
        self._outgoing: dict[socket.socket, tuple[bytes, bytearray, Heard | None, float]] = {}
        self._bell, self._ear = socket.socketpair()
        for end in (self._bell, self._ear):
            end.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    @property
    def open(self) -> int:
        """The number of questions without an answer."""
        return len(self._outgoing)

    def ask(
        self,
        address: Address,
        question: Message,
        heard: Heard | None,
        patience_s: float = float("inf"),
    ) -> None:
        """Begins to ask; `serve` calls `heard`, unless it is None, within `patience_s`."""
        request = self._token + json.dumps(question).encode() + b"\n"
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        status = connection.connect_ex(address)
        until = time.monotonic() + patience_s
        self._outgoing[connection] = (request, bytearray(), heard, until)
        if status not in (0, errno.EINPROGRESS):
            self._end(connection, None, refused=status == errno.ECONNREFUSED)
            return
        self._selector.register(connection, selectors.EVENT_WRITE)

    def serve(self, for_s: float) -> None:
        """Waits until something happens, for at most `for_s` seconds, and handles it."""
        for key, _ in self._selector.select(max(0.0, for_s)):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._ear:
                self._ear.recv(1024)
            elif connection is self._listener:
                self._accept()
            elif connection in self._incoming:
                self._read_question(connection)
            elif connection in self._outgoing:
                self._go_on(connection)
        now = time.monotonic()
        for connection, (_, since) in list(self._incoming.items()):
            if now - since > INCOMING_S:
                self._drop(connection)
        for connection, (*_, until) in list(self._outgoing.items()):
            if now > until:
                self._end(connection, None, refused=False)

    def wake(self) -> None:
        """Makes `serve` return; may be called from any thread."""
        try:
            self._bell.send(b"!")
        except OSError:  # it has been rung already, or is closed
            return

    def close(self) -> None:
        """Closes all connections, and the listener."""
        for connection in list(self._incoming):
            self._drop(connection)
        for connection in list(self._outgoing):
            del self._outgoing[connection]
            connection.close()
        if self._listener is not None:
            self._listener.close()
        self._bell.close()
        self._ear.close()
        self._selector.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone again
            return
        if len(self._incoming) >= INCOMING:
            connection.close()
            return
        connection.setblocking(False)
        self._incoming[connection] = (bytearray(), time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _read_question(self, connection: socket.socket) -> None:
        said, _ = self._incoming[connection]
        try:
            part = connection.recv(LIMIT_BYTES)
        except OSError:
            part = b""
        said += part
        known = hmac.compare_digest(bytes(said[:TOKEN_BYTES]), self._token[: len(said)])
        complete = len(said) > TOKEN_BYTES and said.endswith(b"\n")
        if known and complete:
            assert self._answer is not None
            try:
                answer = self._answer(json.loads(said[TOKEN_BYTES:]))
                connection.send(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError, LookupError, TypeError):  # not a question that we know
                known = False
        if not part or not known or complete or len(said) > LIMIT_BYTES:
            self._drop(connection)

    def _go_on(self, connection: socket.socket) -> None:
        request, answer, heard, _ = self._outgoing[connection]
        try:
            if self._selector.get_key(connection).events == selectors.EVENT_WRITE:
                status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if status:
                    self._end(connection, None, refused=status == errno.ECONNREFUSED)
                    return
                connection.send(request)  # it fits a new connection's buffer
                if heard is None:
                    self._end(connection, None, refused=False)
                else:
                    self._selector.modify(connection, selectors.EVENT_READ)
                return
            part = connection.recv(LIMIT_BYTES)
        except OSError:
            part = b""
        answer += part
        if answer.endswith(b"\n"):
            try:
                self._end(connection, json.loads(answer), refused=False)
            except ValueError:
                self._end(connection, None, refused=False)
        elif not part or len(answer) > LIMIT_BYTES:
            self._end(connection, None, refused=False)

    def _end(self, connection: socket.socket, answer: Message | None, *, refused: bool) -> None:
        _, _, heard, _ = self._outgoing.pop(connection)
        self._forget(connection)
        if heard is not None:
            heard(answer, refused)

    def _drop(self, connection: socket.socket) -> None:
        del self._incoming[connection]
        self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        connection.close()


def ask_at_once(
    token: bytes, addresses: Iterable[Address], question: Message, limit_s: float, *, answers: bool
) -> list[tuple[Message | None, bool]]:
    """Asks several peers, and waits here for at most `limit_s` seconds.

    With `answers` it waits for their answers, and else until the questions are sent. Returns the
    answers that came, each with whether the connection was refused.
    """
    heard: list[tuple[Message | None, bool]] = []
    questions = Questions(token)
    try:
        for address in addresses:
            questions.ask(address, question, (lambda *a: heard.append(a)) if answers else None)
        end = time.monotonic() + limit_s
        while questions.open and time.monotonic() < end:
            questions.serve(end - time.monotonic())
    finally:
        questions.close()
    return heard
