"""What transports with tagged sends and receives have in common."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from typing_extensions import override

from hvd_sparse.errors import HvdSparseError, PlanError
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS
from hvd_sparse.transports import framing
from hvd_sparse.transports.framing import HEADER_BYTES, Context, Payload, name_code
from hvd_sparse.transports.supervised import Awaiting, Call, SupervisedTransport
from hvd_sparse.transports.transport import Done, Handle, check_peers

REMEMBERED_CALLS = 256
"""A rank remembers so many of its last calls, to tell peers what it did in them."""

Way = tuple[str, str, int]
"""Channel, bucket and peer: messages that go the same way have similar sizes."""


class Request(Protocol):
    """A send or a receive that has been started."""

    def wait(self, deadline: float) -> torch.Tensor | None:
        """Waits until `deadline`, a value of `time.monotonic()`.

        Returns for a receive its buffer, whose first bytes are the message; None for a send. Raises
        TransportTimeout or PeerLostError.
        """


class PointToPointTransport(SupervisedTransport):
    """Exchanges over `_isend` and `_irecv`.

    The tag of a message holds, from its lowest bit: whether it is the rest of a payload that
    outgrew its capacity; the place of the call in the sequence of calls, from 0 again when the tags
    are used up, since messages of one tag keep their order; the code of the capacity.
    """

    tag_limit = 1 << 30
    """All tags are smaller than this."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self._calls = 0
        self._send_capacity: dict[Way, int] = {}
        self._receive_capacity: dict[Way, int] = {}
        # Started and not yet waited for: their buffers must live, and the next receive on the same
        # way needs the size of this one.
        self._open: dict[int, Exchange] = {}
        self._arriving: dict[Way, Exchange] = {}
        self._shared: tuple[int, torch.Tensor] | None = None  # of the first of several calls
        self._made: deque[Call] = deque(maxlen=REMEMBERED_CALLS)

    @abstractmethod
    def _isend(self, peer: int, message: torch.Tensor, tag: int) -> Request:
        """Starts to send all bytes of `message`, uint8, which nobody changes any more."""

    @abstractmethod
    def _irecv(self, peer: int, capacity: int, tag: int) -> Request:
        """Starts to receive a message of at most `capacity` bytes."""

    def _isend_first(self, peer: int, message: torch.Tensor, capacity: int, tag: int) -> Request:
        """Like `_isend`, for a message for which the peer has made room of `capacity` bytes."""
        del capacity
        return self._isend(peer, message, tag)

    def _irecv_first(self, peer: int, capacity: int, tag: int) -> Request:
        """Like `_irecv`, where the peer knows the capacity too."""
        return self._irecv(peer, capacity, tag)

    @override
    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        nbytes = check_peers(self.rank, self.world_size, payload, dst, src)
        self._raise_failure()
        number = self._calls
        self._calls = number + 1
        context = self.context
        if dst == self.rank or (dst is None and src is None):
            self._made.append(Call(number, channel, context, dst, src))
            arrived = None if dst is None else framing.flatten(payload or (), self._buffers)
            return Done(arrived)
        stamp = self._stamp(number) if self._shared is None else self._shared[0]
        handle = Exchange(self, channel, context, src, number, stamp)
        sends_up_to = 0
        try:
            # The receive goes first: a message that finds its buffer posted is not copied again.
            if src is not None:
                self._start_receive(handle, src)
            if dst is not None:
                sends_up_to = self._start_send(handle, payload or (), nbytes, dst)
        except HvdSparseError as error:
            self.raise_first(error, dst if src is None else src, f"in call {number} on {channel!r}")
        handle.call = Call(number, channel, context, dst, src, sends_up_to, handle.capacity)
        self._made.append(handle.call)
        self._open[number] = handle
        return handle

    @override
    def allgather(self, payload: Payload, *, channel: str) -> list[torch.Tensor]:
        """`Transport.allgather`; a payload that goes directly to all others is framed once."""
        P, r = self.world_size, self.rank
        if not 1 < P <= DIRECT_ALLGATHER_RANKS:
            return super().allgather(payload, channel=channel)
        stamp, nbytes = self._stamp(self._calls), framing.payload_nbytes(payload)
        message = framing.frame(payload, nbytes, name_code(channel), stamp, self._buffers)
        self._shared = (stamp, message)
        try:
            handles = [self._to_ring(payload, step, channel) for step in range(1, P)]
        finally:
            self._shared = None
        received = [handle.received() for handle in handles]
        own = message[HEADER_BYTES:]
        return [own if i == r else received[(r - i) % P - 1] for i in range(P)]

    @override
    def close(self) -> None:
        super().close()
        self._open.clear()
        self._arriving.clear()

    def renumber(self, number: int) -> int:
        """Continues with another number of calls, that of a group; returns the one until now."""
        number, self._calls = self._calls, number
        return number

    @override
    def call_made(self, number: int) -> Call | None:
        return next((call for call in list(self._made) if call.number == number), None)

    @override
    def calls_made(self) -> int:
        return self._calls

    def _stamp(self, number: int) -> int:
        return framing.stamp(number, self.context.step, name_code(self.context.bucket))

    def _tag(self, number: int, capacity: int) -> int:
        places = self.tag_limit >> (framing.CAPACITY_CODE_BITS + 1)
        return 2 * (framing.capacity_code(capacity) * places + number % places)

    def _start_receive(self, handle: Exchange, src: int) -> None:
        way = (handle.channel, handle.context.bucket, src)
        # The sender's capacity follows from the message before this one. Waiting for that cannot
        # deadlock: the peer started to send it before its own counterpart of this call.
        before = self._arriving.get(way)
        if before is not None:
            before.receive()
        handle.capacity = self._receive_capacity.get(way, framing.MIN_CAPACITY_BYTES)
        tag = self._tag(handle.number, handle.capacity)
        handle.receiving = self._irecv_first(src, handle.capacity, tag)
        self._arriving[way] = handle

    def _start_send(self, handle: Exchange, payload: Payload, nbytes: int, dst: int) -> int:
        """Starts to send; returns the capacity of the first message."""
        context = handle.context
        way = (handle.channel, context.bucket, dst)
        capacity = self._send_capacity.get(way, framing.MIN_CAPACITY_BYTES)
        self._send_capacity[way] = framing.next_capacity(nbytes)
        if self._shared is None:
            code = name_code(handle.channel)
            message = framing.frame(payload, nbytes, code, handle.stamp, self._buffers)
        else:
            message = self._shared[1]
        tag = self._tag(handle.number, capacity)
        if message.numel() <= capacity:
            handle.sending = [self._isend_first(dst, message, capacity, tag)]
        else:
            handle.sending = [
                self._isend_first(dst, message[:capacity], capacity, tag),
                self._isend(dst, message[capacity:], tag + 1),
            ]
        handle.dst = dst
        self.traffic.sent(message.numel(), len(handle.sending))
        return capacity

    def finish_receive(self, handle: Exchange, src: int, deadline: float) -> torch.Tensor:
        """Waits for what `handle` receives, including the second message if there is one."""
        assert handle.receiving is not None
        buffer = handle.receiving.wait(deadline)
        assert buffer is not None
        nbytes, code, stamp = framing.read_header(buffer)
        context = handle.context
        if code != name_code(handle.channel) or stamp != handle.stamp:
            raise PlanError(
                f"rank {self.rank} expects a message from rank {src} in {handle.call}, but it sent "
                f"one {_differences(handle, code, stamp)}: the ranks make different calls"
            )
        message_bytes = HEADER_BYTES + nbytes
        if message_bytes <= handle.capacity:
            arrived = buffer[HEADER_BYTES:message_bytes]
            messages = 1
        else:
            tag = self._tag(handle.number, handle.capacity) + 1
            rest = self._irecv(src, message_bytes - handle.capacity, tag).wait(deadline)
            assert rest is not None
            arrived = torch.cat([buffer[HEADER_BYTES:], rest])
            messages = 2
        self.traffic.received(message_bytes, messages)
        way = (handle.channel, context.bucket, src)
        self._receive_capacity[way] = framing.next_capacity(nbytes)
        if self._arriving.get(way) is handle:
            del self._arriving[way]
        return arrived

    def forget(self, handle: Exchange) -> None:
        self._open.pop(handle.number, None)


@dataclass(eq=False)
class Exchange(Handle):
    """The requests of one exchange, and its outcome."""

    _transport: PointToPointTransport
    channel: str
    context: Context
    src: int | None
    number: int
    stamp: int
    """In its header, with the call's number or that of the first call that shares its message."""
    dst: int | None = None
    call: Call | None = None
    capacity: int = 0
    receiving: Request | None = None
    sending: list[Request] = field(default_factory=list)
    _arrived: torch.Tensor | None = None

    @override
    def wait(self) -> torch.Tensor | None:
        if self.receiving is not None or self.sending:
            self.receive()
            if self.sending:
                self._wait_for(self.dst, receives=False)
                self.sending = []
            self._transport.forget(self)
        return self._arrived

    def receive(self) -> None:
        """Waits for the incoming half only."""
        if self.receiving is not None:
            self._wait_for(self.src, receives=True)
            self.receiving = None

    def _wait_for(self, peer: int | None, *, receives: bool) -> None:
        assert peer is not None
        transport, now = self._transport, time.monotonic()
        awaited = transport.awaited = Awaiting((peer,), now, call=self.call, receives=receives)
        deadline = transport.deadline_from(now)
        try:
            if receives:
                self._arrived = transport.finish_receive(self, peer, deadline)
            else:
                for request in self.sending:
                    request.wait(deadline)
        except HvdSparseError as error:
            story = f"it has waited {time.monotonic() - now:.2f} s for {awaited.what}"
            transport.raise_first(error, peer, story)
        finally:
            transport.awaited = None


def _differences(handle: Exchange, code: int, stamp: int) -> str:
    """How a received message differs from the expected one."""
    call, step, bucket = framing.read_stamp(stamp)
    my_call, my_step, my_bucket = framing.read_stamp(handle.stamp)
    differences = {
        "on another channel": code != name_code(handle.channel),
        "for another bucket": bucket != my_bucket,
        f"of step {step}": step != my_step,
        f"of another call ({call})": call != my_call,
    }
    return ", ".join(words for words, is_so in differences.items() if is_so)
