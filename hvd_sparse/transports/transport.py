"""The interface of a transport, and the collectives that it builds from one exchange.

Symbols: P ranks, r this rank, L the bytes of a payload, α the cost of a message, β that of a byte.

| collective | steps | messages a rank sends | bytes a rank sends |
|---|---|---|---|
| all_to_all | P - 1, four in flight | P - 1 | its payloads for others |
| allgather (Bruck) | ceil(log2 P) | ceil(log2 P) | (P - 1) L, for equal payloads |
| allgather (direct, P <= 4) | 1 | P - 1 | (P - 1) L |
| allreduce_sum (recursive doubling) | floor(log2 P), or 2 more | at most as steps | L a message |
| broadcast (binomial tree) | ceil(log2 P) | at most ceil(log2 P) | L a message |

The 2 additional steps of allreduce_sum are for worlds whose size is no power of two.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from typing_extensions import override

from hvd_sparse.cost_model import Link, Work
from hvd_sparse.errors import HvdSparseError, PlanError, TransportError
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS, Cube, batches
from hvd_sparse.transports.framing import BufferPool, Context, Payload, flatten, payload_nbytes
from hvd_sparse.transports.waiting import HorovodWait

ALIGNMENT = 8
SUMMABLE = (torch.int64, torch.float32, torch.float64)

Result = TypeVar("Result")


@dataclass(slots=True)
class Traffic:
    """What one rank sent and received, headers included.

    Only the thread that uses the transport writes. Any thread may read; a `snapshot` between two
    calls is exact.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0

    def sent(self, nbytes: int, messages: int = 1) -> None:
        self.messages_sent += messages
        self.bytes_sent += nbytes

    def received(self, nbytes: int, messages: int = 1) -> None:
        self.messages_received += messages
        self.bytes_received += nbytes

    def snapshot(self) -> Traffic:
        """A copy that no longer changes."""
        return replace(self)

    def since(self, earlier: Traffic) -> Traffic:
        """The counts since `earlier`, a snapshot of these counters."""
        return Traffic(
            self.messages_sent - earlier.messages_sent,
            self.bytes_sent - earlier.bytes_sent,
            self.messages_received - earlier.messages_received,
            self.bytes_received - earlier.bytes_received,
        )


class Handle(ABC):
    """An exchange under way."""

    @abstractmethod
    def wait(self) -> torch.Tensor | None:
        """Waits until the payload is sent and the other one is received; may be called again.

        Returns:
            The received bytes, uint8 and 8-byte aligned, the caller's to keep; None without source.

        Raises:
            TransportTimeout: A peer did not answer within the transport's timeout.
            PeerLostError: A peer's connection is gone.
            PlanError: The peer makes another call than this rank.
        """

    def received(self) -> torch.Tensor:
        """What `wait` returns, for an exchange that has a source."""
        return _there(self.wait())


class Done(Handle):
    """A handle whose outcome is known from the start."""

    def __init__(self, result: torch.Tensor | None) -> None:
        self._result = result

    @override
    def wait(self) -> torch.Tensor | None:
        return self._result


class Transport(ABC):
    """Messages of variable size among P ranks.

    Every call is collective: all ranks make the same calls in the same order, each from one thread
    at a time (`abort` may come from any). `channel` names a purpose, the same on all ranks. A
    transport remembers capacities for each channel, so names should come from a small set.

    After a `TransportError` a transport is useless, on every rank: build another.

    Attributes:
        rank, world_size: r, in `[0, P)`, and P.
        timeout_s: Seconds after which a wait gives up.
        link: What a message costs, the same on all ranks; None if nobody measured or gave it.
        context: The bucket and step, the same on all ranks; messages and errors carry it.
        failure: The first failure, here or at a peer; None without one.
        waiting: Entered while this rank waits for Horovod; peers that ask are told.
        device: Whose memory `allgather_on_devices` sends from; None: there is no device.
    """

    name: str = "abstract"
    device: torch.device | None = None
    link: Link | None = None
    context: Context = Context()
    failure: HvdSparseError | None = None

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.traffic = Traffic()
        self.waiting = HorovodWait()
        self._buffers = BufferPool()

    @abstractmethod
    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        """Starts to send `payload` to `dst` and to receive from `src`; either may be None.

        The payload's tensors may be changed as soon as this returns. This rank itself may only be
        both ends. The `channel` is equal at both.

        Returns:
            A handle that must be waited for. Exchanges on different channels or between different
            pairs are in flight together; one on the same channel from the same rank first waits
            for the last arrival.
        """

    def land_pinned(self) -> None:
        """Receives in pinned memory from now on, out of which a device copies by itself."""
        self._buffers.pinned = True

    @property
    def feeds_device(self) -> bool:
        """Whether a device sums what arrives."""
        return self._buffers.pinned

    def worked(self, work: Work) -> None:
        """Notes what a collective has computed; in the simulator this takes virtual time."""
        del work

    @abstractmethod
    def abort(self, reason: object = None) -> None:
        """Makes all pending and future waits fail, on the peers too, which report the reason."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections and memory; may be called again."""

    def all_to_all(self, payloads: Sequence[Payload], *, channel: str) -> list[torch.Tensor]:
        """Sends `payloads[i]` to rank i; returns what each rank had for this one, uint8, by rank.

        Step s sends to r + s and receives from r - s: in no step do two ranks send to the same one.
        """
        P, r = self.world_size, self.rank
        if len(payloads) != P:
            raise ValueError(f"all_to_all takes a payload per rank, {P}, got {len(payloads)}")
        received = [flatten(payloads[r], self._buffers)] * P
        for distances in batches(P):
            handles = [
                ((r - s) % P, self._to_ring(payloads[(r + s) % P], s, channel)) for s in distances
            ]
            for src, handle in handles:
                received[src] = handle.received()
        return received

    def allgather(self, payload: Payload, *, channel: str) -> list[torch.Tensor]:
        """Gives every rank's payload to every rank; sizes may differ.

        In a small world, every rank sends its own to all others at once. In a larger one, this is
        Bruck's concatenation (Bruck et al., IEEE TPDS 8(11), 1997): before round j a rank holds the
        blocks of 2**j ranks, from itself onward, and gets those of the next 2**j. A message is a
        table of its blocks' sizes, then the blocks, each padded to 8 bytes.

        Returns:
            P uint8 tensors, by rank; nobody may change them.
        """
        P, r = self.world_size, self.rank
        if P <= DIRECT_ALLGATHER_RANKS:
            return self.all_to_all([payload] * P, channel=channel)
        own = flatten(payload, self._buffers)
        sizes, blocks = [own.numel()], [_padded(own)]  # of ranks r, r + 1, …
        while (distance := len(blocks)) < P:
            count = min(distance, P - distance)
            table = torch.tensor(sizes[:count], dtype=torch.int64, device="cpu")
            peers = (r - distance) % P, (r + distance) % P
            handle = self.exchange([table, *blocks[:count]], *peers, channel=channel)
            theirs, body = handle.received().tensor_split((table.nbytes,))
            sizes += theirs.view(torch.int64).tolist()
            blocks += body.split([round_up(size) for size in sizes[distance:]])
        return [blocks[(i - r) % P][: sizes[(i - r) % P]] for i in range(P)]

    def allgather_on_devices(
        self, sent: torch.Tensor, header_bytes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives every rank's bytes to every rank, from device to device; waits for them.

        `sent` is uint8 `(m,)` on `device`, m above 0. The host needs the first `header_bytes` of
        each message, too. Both numbers are the same on all ranks.

        Returns:
            uint8 `(P, m)` on `device`, and uint8 `(P, header_bytes)` on the host; by rank.

        Raises:
            TransportError: A peer is gone or did not answer.
        """
        raise NotImplementedError(f"{self.name} has no device")

    def allreduce_sum(self, tensor: torch.Tensor, *, channel: str) -> torch.Tensor:
        """Sums a small tensor over all ranks; every rank gets the same bits.

        Recursive doubling. Where P is no power of two, the surplus ranks first hand theirs to a
        neighbour, and get the sum from it at the end. Operands are added in the order of the ranks.

        `tensor` is int64, float32 or float64, of the same shape on all ranks; TypeError or
        PlanError where it is not.
        """
        if tensor.dtype not in SUMMABLE:
            raise TypeError(f"allreduce_sum takes {SUMMABLE}, got {tensor.dtype}")
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        cube = Cube(self.rank, self.world_size)
        gives, takes = (cube.partner, None) if cube.is_passive else (None, cube.partner)
        is_folded = cube.positions < self.world_size
        if is_folded:
            theirs = self._swap_sums(total, gives, takes, channel)
            total = total if theirs is None else total + theirs
        for mask in cube.masks():
            peer = cube.peer(mask)
            theirs = self._swap_sums(total, peer, peer, channel)
            if theirs is not None:
                total = total + theirs if cube.position & mask == 0 else theirs + total
        if is_folded:
            theirs = self._swap_sums(total, takes, gives, channel)
            total = total if theirs is None else theirs.clone()
        return total

    def broadcast(self, payload: Payload | None, *, channel: str) -> torch.Tensor:
        """Gives rank 0's payload to every rank, as uint8, along a binomial tree."""
        P, r = self.world_size, self.rank
        data: torch.Tensor | None = None
        if r == 0:
            if payload is None:
                raise TypeError("broadcast needs a payload on rank 0")
            data = flatten(payload, self._buffers)
        for mask in (1 << j for j in range((P - 1).bit_length())):
            dst = r + mask if r < mask and r + mask < P else None
            src = r - mask if mask <= r < 2 * mask else None
            passed_on = None if dst is None else [_there(data)]
            arrived = self.exchange(passed_on, dst, src, channel=channel).wait()
            data = data if arrived is None else arrived
        return _there(data)

    def _to_ring(self, payload: Payload, step: int, channel: str) -> Handle:
        P = self.world_size
        return self.exchange(
            payload, (self.rank + step) % P, (self.rank - step) % P, channel=channel
        )

    def _swap_sums(
        self, total: torch.Tensor, dst: int | None, src: int | None, channel: str
    ) -> torch.Tensor | None:
        """One exchange of partial sums; the received one has the shape and type of `total`."""
        arrived = self.exchange([total], dst, src, channel=channel).wait()
        if arrived is None:
            return None
        if arrived.numel() != total.nbytes:
            raise PlanError(
                f"allreduce_sum on channel {channel!r}: rank {self.rank} has {total.nbytes} bytes, "
                f"rank {src} has {arrived.numel()}"
            )
        return arrived.view(total.dtype).view(total.shape)


def gather_json(transport: Transport, mine: object, channel: str) -> list[Any]:
    """What each rank says, by rank, as JSON; collective."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    messages = transport.allgather((text,), channel=channel)
    return [json.loads(bytes(message.numpy())) for message in messages]


def check_peers(
    rank: int, world_size: int, payload: Payload | None, dst: int | None, src: int | None
) -> int:
    """Checks the arguments of `exchange`; returns the bytes to send, 0 without `dst`."""
    for name, peer in (("dst", dst), ("src", src)):
        if peer is not None and not 0 <= peer < world_size:
            raise ValueError(f"{name} must be in [0, {world_size}) or None, got {peer}")
    if (dst == rank) != (src == rank):
        raise ValueError(
            f"rank {rank} can only send to itself what it also receives: {dst=}, {src=}"
        )
    if dst is None:
        return 0
    if payload is None:
        raise TypeError(f"exchange to rank {dst} needs a payload")
    return payload_nbytes(payload)


def started(name: str, call: Callable[[], Result]) -> Future[Result]:
    """What a call comes to that may block forever; a thread makes it.

    Raises:
        TransportError: No thread could be started.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # whatever it is, the one who waits is told
            outcome.set_exception(error)

    start_thread(name, run)
    return outcome


def start_thread(name: str, task: Callable[..., object], *arguments: object) -> threading.Thread:
    """A background thread that runs a task, and does not outlive the process.

    Raises:
        TransportError: The system has no more threads, or no memory for another one's stack.
    """
    thread = threading.Thread(target=task, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"no thread could be started for {name!r}: {error}: see the limits of processes and "
            "of memory (ulimit -u, ulimit -v, pids.max)"
        ) from error
    return thread


def round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _there(data: torch.Tensor | None) -> torch.Tensor:
    if data is None:
        raise PlanError("a rank was to pass on what it had not received")
    return data


def _padded(block: torch.Tensor) -> torch.Tensor:
    padding = round_up(block.numel()) - block.numel()
    return torch.nn.functional.pad(block, (0, padding)) if padding else block
