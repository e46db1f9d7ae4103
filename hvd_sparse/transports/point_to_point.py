"""The part that transports with tagged sends and receives have in common."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Protocol

import torch

from hvd_sparse.errors import PeerLostError, PlanError, TransportError
from hvd_sparse.transports import framing
from hvd_sparse.transports.base import Done, Handle, Transport, check_peers
from hvd_sparse.transports.framing import HEADER_BYTES, Payload


class Request(Protocol):
    """A send or a receive that has been started."""

    def wait(self, deadline: float) -> torch.Tensor | None:
        """Waits until `deadline`, a value of `time.monotonic()`.

        Returns:
            For a receive its buffer, whose first bytes are the message; None for a send.

        Raises:
            TransportTimeout: The deadline passed.
            PeerLostError: The connection is gone.
        """


class PointToPointTransport(Transport):
    """Exchanges over `_isend` and `_irecv`.

    The tag of a message is its place in the sequence of calls, which is the same on all ranks. Each
    call takes two: one for the message, one for the rest of a payload that outgrew the capacity.
    """

    tag_limit = 1 << 30
    """Tags stay below, and start again from 0: messages of one tag keep their order."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self._next_tag = 0
        self._send_capacity: dict[tuple[str, int], int] = {}
        self._receive_capacity: dict[tuple[str, int], int] = {}
        self._codes: dict[str, int] = {}
        # Started and not yet waited for: their buffers must live, and the next receive from the
        # same rank on the same channel needs to know the size of this one.
        self._open: dict[int, Exchange] = {}
        self._arriving: dict[tuple[str, int], Exchange] = {}
        self._failure: TransportError | None = None

    @abstractmethod
    def _isend(self, peer: int, message: torch.Tensor, tag: int) -> Request:
        """Starts to send all bytes of `message`, uint8; nobody changes it any more."""

    @abstractmethod
    def _irecv(self, peer: int, capacity: int, tag: int) -> Request:
        """Starts to receive a message of at most `capacity` bytes."""

    def _isend_first(self, peer: int, message: torch.Tensor, capacity: int, tag: int) -> Request:
        """Like `_isend`, for the message for which the peer has made room of `capacity` bytes."""
        del capacity
        return self._isend(peer, message, tag)

    def _irecv_first(self, peer: int, capacity: int, tag: int) -> Request:
        """Like `_irecv`, where the peer knows the capacity too."""
        return self._irecv(peer, capacity, tag)

    @abstractmethod
    def _abort_connections(self) -> None:
        """Makes the waits of all ranks fail; must not raise."""

    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        """See `Transport.exchange`."""
        nbytes = check_peers(self.rank, self.world_size, payload, dst, src)
        self._raise_failure()
        tag = self._next_tag
        self._next_tag = (tag + 2) % self.tag_limit
        if dst == self.rank:
            return Done(framing.flatten(payload or (), self._buffers))
        if dst is None and src is None:
            return Done(None)
        handle = Exchange(self, channel, src, tag)
        try:
            # The receive goes first: a message that finds its buffer posted is not copied again.
            if src is not None:
                self._start_receive(handle, src)
            if dst is not None:
                self._start_send(handle, payload or (), nbytes, dst)
        except TransportError as error:
            self.fail(error)
            raise
        self._open[tag] = handle
        return handle

    def abort(self) -> None:
        """See `Transport.abort`."""
        self.fail(PeerLostError(f"rank {self.rank} aborted the transport"))

    def close(self) -> None:
        """See `Transport.close`."""
        if self._failure is None:
            self._failure = TransportError(f"the transport of rank {self.rank} is closed")
        self._open.clear()
        self._arriving.clear()

    def fail(self, error: TransportError) -> None:
        """Keeps the first failure for all later calls, and tells the peers."""
        if self._failure is None:
            self._failure = error
            self._abort_connections()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            kind = type(self._failure)
            raise kind(f"this transport is of no more use: {self._failure}") from self._failure

    def code(self, channel: str) -> int:
        """The channel's code in headers."""
        code = self._codes.get(channel)
        if code is None:
            code = self._codes[channel] = framing.channel_code(channel)
        return code

    def _start_receive(self, handle: Exchange, src: int) -> None:
        way = (handle.channel, src)
        # The sender's capacity counts with the message before this one. Waiting for it here cannot
        # deadlock: the peer started to send it before its own counterpart of this call.
        before = self._arriving.get(way)
        if before is not None:
            before.receive(time.monotonic() + self.timeout_s)
        handle.capacity = self._receive_capacity.get(way, framing.MIN_CAPACITY_BYTES)
        handle.receiving = self._irecv_first(src, handle.capacity, handle.tag)
        self._arriving[way] = handle

    def _start_send(self, handle: Exchange, payload: Payload, nbytes: int, dst: int) -> None:
        way = (handle.channel, dst)
        capacity = self._send_capacity.get(way, framing.MIN_CAPACITY_BYTES)
        self._send_capacity[way] = framing.next_capacity(nbytes)
        message = framing.frame(payload, nbytes, self.code(handle.channel), self._buffers)
        if message.numel() <= capacity:
            handle.sending = [self._isend_first(dst, message, capacity, handle.tag)]
        else:
            handle.sending = [
                self._isend_first(dst, message[:capacity], capacity, handle.tag),
                self._isend(dst, message[capacity:], handle.tag + 1),
            ]
        self.traffic.sent(message.numel(), len(handle.sending))

    def finish_receive(self, handle: Exchange, deadline: float) -> torch.Tensor:
        """Waits for what `handle` receives, the second message included if there is one."""
        src = handle.src
        assert handle.receiving is not None
        assert src is not None
        buffer = handle.receiving.wait(deadline)
        assert buffer is not None
        nbytes, code = framing.read_header(buffer)
        if code != self.code(handle.channel):
            raise PlanError(
                f"rank {self.rank} expects a message on channel {handle.channel!r} from rank "
                f"{src}, which sent one on another channel: the ranks make different calls"
            )
        message_bytes = HEADER_BYTES + nbytes
        if message_bytes <= handle.capacity:
            arrived = buffer[HEADER_BYTES:message_bytes]
            messages = 1
        else:
            rest = self._irecv(src, message_bytes - handle.capacity, handle.tag + 1).wait(deadline)
            assert rest is not None
            arrived = torch.cat([buffer[HEADER_BYTES:], rest])
            messages = 2
        self.traffic.received(message_bytes, messages)
        way = (handle.channel, src)
        self._receive_capacity[way] = framing.next_capacity(nbytes)
        if self._arriving.get(way) is handle:
            del self._arriving[way]
        return arrived

    def forget(self, handle: Exchange) -> None:
        """Drops a handle that has nothing more to wait for."""
        self._open.pop(handle.tag, None)


class Exchange(Handle):
    """The requests of one exchange, and its outcome."""

    __slots__ = (
        "_arrived",
        "_transport",
        "capacity",
        "channel",
        "receiving",
        "sending",
        "src",
        "tag",
    )

    def __init__(
        self, transport: PointToPointTransport, channel: str, src: int | None, tag: int
    ) -> None:
        self._transport = transport
        self._arrived: torch.Tensor | None = None
        self.channel = channel
        self.src = src
        self.tag = tag
        self.capacity = 0
        self.receiving: Request | None = None
        self.sending: list[Request] = []

    def wait(self) -> torch.Tensor | None:
        """See `Handle.wait`."""
        if self.receiving is not None or self.sending:
            deadline = time.monotonic() + self._transport.timeout_s
            self.receive(deadline)
            try:
                for request in self.sending:
                    request.wait(deadline)
            except TransportError as error:
                self._transport.fail(error)
                raise
            self.sending = []
            self._transport.forget(self)
        return self._arrived

    def receive(self, deadline: float) -> None:
        """Waits for the incoming half only."""
        if self.receiving is None:
            return
        try:
            self._arrived = self._transport.finish_receive(self, deadline)
        except TransportError as error:
            self._transport.fail(error)
            raise
        self.receiving = None
