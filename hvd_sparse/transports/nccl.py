"""Large messages from device to device over NCCL, and small ones over gloo.

Messages are made on the host. A large one goes through pinned memory to the device, over NCCL to
the peer's device, and through pinned memory to its host. The exchange queues all of that on the
device when it starts (`DeviceGroup`). The host only checks, in `wait`, whether it has finished.

**Sizes.** Both ends must name the same one beforehand: the capacity (`framing`). A message with a
capacity above `direct_bytes` goes over NCCL, padded to it. That is at most a quarter more bytes,
but takes no round for sizes, and no wait of the host. What outgrows the capacity goes over gloo.

**Order.** NCCL's messages have no tags either: they match in the order in which they start. The
messages of one exchange (a send, a receive or both) are one group, started when the call is made.
Group i waits only for its peers' groups up to i, and all ranks make the same calls: no circle of
waits can arise.

**Without the host.** Data on the devices can stay there (`exchange_on_devices`,
`allgather_on_devices`): both ends then know the sizes, and nothing is padded here.

**Ends.** NCCL cannot give up a wait by itself, and does not tell the peers of a failure. Waits here
look, until their deadline, whether the group has finished, and now and then whether a peer left a
note in the store that it gave up.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from typing_extensions import override

from hvd_sparse.errors import PeerLostError, TransportError, TransportTimeout
from hvd_sparse.transports.framing import POOLED_BYTES, Payload
from hvd_sparse.transports.gloo import LONGEST_WAIT, GlooTransport
from hvd_sparse.transports.meeting import MeetingStore, dist
from hvd_sparse.transports.point_to_point import Request
from hvd_sparse.transports.supervised import Awaiting
from hvd_sparse.transports.transport import Handle, started
from hvd_sparse.transports.waiting import Pauses

DIRECT_BYTES = POOLED_BYTES
"""Up to this capacity gloo is quicker: NCCL needs two copies and a launch first."""

SPIN_S = 50e-6
"""Spin this long before sleeping."""

LOOK_S = 0.1
"""Interval of looking for a peer's note, which costs a message to rank 0 and back."""

GRACE_S = 5.0
"""NCCL may take this long to end."""

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""By default torch's watchdog ends the process when NCCL fails; here, the waits raise instead."""

ENDING = "hvd_sparse ends NCCL"
_NOTE = "gave up"

Brought = TypeVar("Brought")


def problem_with_nccl() -> str | None:
    """Why this process cannot use NCCL, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if not hasattr(dist.ProcessGroupNCCL, "abort"):
        return f"torch {torch.__version__} cannot abort NCCL (2.6 can)"
    return None


def connect_nccl(store: Any, rank: int, world_size: int, device: torch.device) -> Any:
    """Makes an NCCL process group; blocks until all ranks have come.

    Every pair exchanges a message: the first one sets its connection up, and may block for good.
    """
    torch.cuda.set_device(device)  # a new thread's is the first one
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # torch's watchdog would end the process on a timeout; the waits here end themselves.
    options._timeout = LONGEST_WAIT
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"  # the constructor reads it
    try:
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    finally:
        os.environ.pop(ERROR_HANDLING)
        if before is not None:
            os.environ[ERROR_HANDLING] = before
    with torch.cuda.stream(torch.cuda.Stream(device)):
        told = torch.full((world_size,), rank, device=device, dtype=torch.float32)
        ranks, each = torch.empty_like(told), [1] * world_size
        group.alltoall_base(ranks, told, each, each).wait()
        came = ranks.tolist()
    if came != list(range(world_size)):
        raise RuntimeError(f"NCCL brought the ranks {came}")
    return group


class NcclTransport(GlooTransport):
    """One rank of a gloo group whose ranks have a device each.

    The ranks meet in `meeting` for gloo, and in `store` for NCCL. `connect` makes the group of the
    devices. Messages up to a capacity of `direct_bytes`, the same on all ranks, go over gloo.
    """

    name = "nccl"

    def __init__(
        self,
        rank: int,
        world_size: int,
        meeting: MeetingStore,
        store: Any,
        *,
        host: str,
        timeout_s: float,
        device: torch.device,
        connect: Callable[[Any, int, int, torch.device], Any] = connect_nccl,
        direct_bytes: int = DIRECT_BYTES,
    ) -> None:
        super().__init__(rank, world_size, meeting, host=host, timeout_s=timeout_s)
        self.device: torch.device = device
        self.direct_bytes = direct_bytes
        self._notes = dist.PrefixStore("notes", store)
        self._outgoing: _Half | None = None
        self._incoming: _Half | None = None
        self._devices: DeviceGroup | None = None
        group = self._connected(connect, dist.PrefixStore("nccl", store))
        self._devices = DeviceGroup(group, world_size, device)

    @override
    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        handle = super().exchange(payload, dst, src, channel=channel)
        outgoing, incoming = self._outgoing, self._incoming
        self._outgoing = self._incoming = None
        if outgoing is not None or incoming is not None:
            self._start_group(outgoing, incoming)
        return handle

    def exchange_on_devices(
        self, sent: torch.Tensor, to_peers: Mapping[int, int], from_peers: Mapping[int, int]
    ) -> torch.Tensor:
        """Brings bytes from device to device, and waits for them (NCCL would wait forever).

        The ranks that exchange something call this together, between the same other calls.
        `to_peers` says how many bytes of `sent`, uint8 `(n,)` on this rank's device with n above 0,
        go to each rank, in their order; `from_peers`, how many come, and are returned in order.

        Raises:
            TransportError: A peer is gone or did not answer.
        """
        assert self._devices is not None
        peers = sorted({*to_peers, *from_peers} - {self.rank})
        to, of = (
            [sizes.get(rank, 0) for rank in range(self.world_size)]
            for sizes in (to_peers, from_peers)
        )
        return self._brought(partial(self._devices.all_to_all, sent, to, of), peers)

    @override
    def allgather_on_devices(
        self, sent: torch.Tensor, header_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._devices is not None
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        arrived = self._brought(partial(self._devices.allgather, sent, header_bytes), peers)
        self.traffic.sent(sent.numel() * len(peers), len(peers))
        self.traffic.received(sent.numel() * len(peers), len(peers))
        return arrived

    def _brought(
        self, start: Callable[[], tuple[Brought, Transfer]], peers: Sequence[int]
    ) -> Brought:
        """What an exchange among the devices brings, once it has arrived."""
        self._raise_failure()
        began, told = time.monotonic(), f"devices of ranks {', '.join(map(str, peers))}"
        self.awaited_beside[id(start)] = Awaiting(tuple(peers), began, told)
        try:
            arrived, transfer = start()
            self.poll(transfer.is_through, self.deadline_from(began), f"one of the {told}")
        except RuntimeError as error:
            peer = peers[0] if peers else self.rank
            lost = error if isinstance(error, TransportError) else self.error_of(error, peer)
            story = f"it has waited {time.monotonic() - began:.2f} s for {told}"
            self.raise_first(lost, None, story)
        finally:
            del self.awaited_beside[id(start)]
        return arrived

    @override
    def bytes_moved(self) -> None:
        return None  # NCCL's are not known

    @override
    def close(self) -> None:
        if self._open:
            self.abort()
        devices, self._devices = self._devices, None
        if devices is not None and self.failure is None:
            try:
                ended = started(ENDING, devices.group.shutdown)  # waits for the peers to do so, too
                self.poll(ended.done, time.monotonic() + GRACE_S, "some rank")
            except TransportError:  # a peer is not at its end, or has given up; or no thread starts
                with contextlib.suppress(TransportError):
                    wait([started(ENDING, devices.group.abort)], GRACE_S)
        super().close()

    def _connected(self, connect: Callable[..., Any], store: Any) -> Any:
        """The devices' group, made by a thread because that may block forever."""
        made = started(
            "hvd_sparse connects NCCL",
            lambda: connect(store, self.rank, self.world_size, self.device),
        )
        try:
            self.poll(made.done, time.monotonic() + self.timeout_s, "some rank")
            failure = made.exception()
            if failure is not None:
                raise TransportError(f"NCCL on {self.device}: {failure}") from failure
        except TransportError as error:
            self.fail(error)
            raise type(error)(
                f"rank {self.rank} could not connect the {self.world_size} ranks' devices: "
                f"{error}; HVD_SPARSE_TRANSPORT=gloo does without NCCL"
            ) from error
        return made.result()

    def _isend_first(self, peer: int, message: torch.Tensor, capacity: int, tag: int) -> Request:
        if capacity <= self.direct_bytes:
            return self._isend(peer, message, tag)
        self._outgoing = _Half(self, peer, message, capacity)
        return self._outgoing

    def _irecv_first(self, peer: int, capacity: int, tag: int) -> Request:
        if capacity <= self.direct_bytes:
            return self._irecv(peer, capacity, tag)
        assert self._devices is not None
        self._incoming = _Half(self, peer, self._devices.host_buffer(capacity), capacity)
        return self._incoming

    def _start_group(self, outgoing: _Half | None, incoming: _Half | None) -> None:
        halves = [half for half in (outgoing, incoming) if half is not None]
        assert self._devices is not None
        try:
            transfer = self._devices.start(
                None if outgoing is None else (outgoing.peer, outgoing.buffer, outgoing.capacity),
                None if incoming is None else (incoming.peer, incoming.buffer),
            )
        except RuntimeError as error:
            lost = self.error_of(error, halves[0].peer)
            self.fail(lost)
            raise lost from error
        for half in halves:
            half.transfer = transfer

    def _abort_connections(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._notes.set(_NOTE, f"rank {self.rank} gave the transport up: {self.failure}")
        super()._abort_connections()
        if self._devices is not None:
            with contextlib.suppress(TransportError):  # no thread
                wait([started(ENDING, self._devices.group.abort)], GRACE_S)

    def poll(self, is_through: Callable[[], bool], deadline: float, awaited: str) -> None:
        """Waits until `is_through()`.

        Raises:
            TransportTimeout: The deadline passed.
            PeerLostError: A peer has given the transport up, or another thread of this rank has.
        """
        pauses = Pauses(SPIN_S)
        look_at = time.monotonic() + LOOK_S
        while not is_through() and self.failure is None:
            now = time.monotonic()
            if now >= deadline:
                raise TransportTimeout(
                    f"rank {self.rank}: {awaited} did not answer within {self.timeout_s:g} s"
                )
            if now >= look_at:
                self._look_for_note()
                look_at = now + LOOK_S
            pauses.pause()
        if self.failure is not None:  # what is aborted looks as if it were through
            raise PeerLostError(f"rank {self.rank}: {self.failure}")

    def _look_for_note(self) -> None:
        try:
            note = self._notes.get(_NOTE).decode() if self._notes.check([_NOTE]) else None
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank} lost rank 0's store: {error}") from error
        if note is not None:
            raise PeerLostError(f"rank {self.rank}: {note}")


@dataclass(eq=False, slots=True)
class _Half:
    """What one exchange sends over NCCL, or receives."""

    _transport: NcclTransport
    peer: int
    buffer: torch.Tensor
    capacity: int
    transfer: Transfer | None = None

    def wait(self, deadline: float) -> torch.Tensor:
        transfer = self.transfer
        assert transfer is not None
        try:
            self._transport.poll(transfer.is_through, deadline, f"rank {self.peer}")
        except TransportError:
            raise
        except RuntimeError as error:
            raise self._transport.error_of(error, self.peer) from error
        return self.buffer


class DeviceGroup:
    """Messages between the ranks' devices that begin and end in host memory.

    An exchange is an all-to-all with at most one split: NCCL makes one group of its send and its
    receive, in one launch, and leaves out what is empty. A rank that has neither need not call.
    `group` is a `ProcessGroupNCCL`, or one that behaves like it: calls run in their order, and a
    send waits for the peer's receive of the same size.
    """

    def __init__(self, group: Any, world_size: int, device: torch.device) -> None:
        self.group = group
        self._world_size = world_size
        self._device = device
        # Two streams, so that no message on its way up waits for one on its way down.
        on_device = device.type == "cuda"
        self._up = torch.cuda.Stream(device) if on_device else None
        self._down = torch.cuda.Stream(device) if on_device else None

    def start(
        self,
        outgoing: tuple[int, torch.Tensor, int] | None,
        incoming: tuple[int, torch.Tensor] | None,
    ) -> Transfer:
        """Queues a send, a receive, or both at once; the host does not wait.

        `outgoing` is the peer, a message in host memory that nobody changes any more, and how many
        bytes to send: it is padded with anything. `incoming` is the peer, and a `host_buffer` of as
        many bytes as it sends.
        """
        dst, message, sent_bytes = outgoing or (0, self._empty(0), 0)
        src, buffer = incoming or (0, self._empty(0))
        to_peers, from_peers = [0] * self._world_size, [0] * self._world_size
        to_peers[dst], from_peers[src] = sent_bytes, buffer.numel()
        with torch.cuda.stream(self._up):  # None changes nothing
            sent = self._empty(sent_bytes)
            sent[: message.numel()].copy_(message, non_blocking=True)
            arrived = buffer if self._up is None else self._empty(buffer.numel())
            work = self.group.alltoall_base(arrived, sent, from_peers, to_peers)
        end = None
        if self._down is not None:
            with torch.cuda.stream(self._down):
                work.wait()  # of the stream, not of the host
                buffer.copy_(arrived, non_blocking=True)
                end = self._down.record_event()
        return Transfer(work, end, (sent, arrived, message, buffer))

    def all_to_all(
        self, sent: torch.Tensor, to_peers: list[int], from_peers: list[int]
    ) -> tuple[torch.Tensor, Transfer]:
        """Queues an exchange of data on the devices behind the current stream's work.

        `sent` has `to_peers` bytes for each rank, at least one above 0, in the order of the ranks.
        The current stream waits for the received data, `from_peers` bytes of each rank.
        """
        arrived = self._empty(sum(from_peers))
        work = self.group.alltoall_base(arrived, sent, from_peers, to_peers)
        if self._up is not None:
            work.wait()  # of the stream, not of the host
        return arrived, self._transfer(work, sent, arrived)

    def allgather(
        self, sent: torch.Tensor, header_bytes: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Transfer]:
        """Queues an allgather of equally many bytes; otherwise like `all_to_all`.

        Of `sent`, uint8 `(n,)` on the device, the first `header_bytes` go on to the host behind the
        exchange. Returns the received data, `(P, n)`, and in host memory its headers, `(P, h)`; the
        transfer is through when both have arrived.
        """
        P = self._world_size
        arrived = self._empty(P * sent.numel())
        work = self.group._allgather_base(arrived, sent)
        arrived = arrived.view(P, -1)
        headers = arrived[:, :header_bytes]
        if self._up is not None:
            work.wait()  # of the stream, not of the host
            on_host = self.host_buffer(P * header_bytes).view(P, header_bytes)
            headers = on_host.copy_(headers, non_blocking=True)
        return (arrived, headers), self._transfer(work, sent, arrived, headers)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 `(nbytes,)`, pinned so that a device copies asynchronously."""
        return torch.empty(
            nbytes, dtype=torch.uint8, pin_memory=self._down is not None, device="cpu"
        )

    def _transfer(self, work: Any, *kept: torch.Tensor) -> Transfer:
        """An exchange, and what the current stream has queued behind it."""
        end = None
        if self._up is not None:
            end = torch.cuda.current_stream(self._device).record_event()
        return Transfer(work, end, kept)

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


@dataclass(eq=False, slots=True)
class Transfer:
    """An exchange under way; keeps its memory alive."""

    _work: Any
    _end: torch.cuda.Event | None
    _kept: object

    def is_through(self) -> bool:
        """Whether the data has arrived; raises RuntimeError where backend or device failed."""
        return bool(self._work.is_completed() if self._end is None else self._end.query())
