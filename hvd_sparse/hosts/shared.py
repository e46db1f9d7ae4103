"""The dense exchange of a host through memory that its ranks share.

Each rank has a segment for each bucket, which it alone writes: two numbers, its gradients, and its
shard's reduced stream. The numbers say how many steps' gradients, and streams, have been written.

A rank writes the gradients of a step only when it has read all streams of the step before, and its
stream only when all gradients are there. So nobody overwrites what another one still reads, with no
further barrier: who has posted a stream has read the gradients, and who has posted gradients has
decoded the last step's streams.

Any thread may wait here, beside one that exchanges messages, and for any bucket: each rank comes to
each bucket in the end, whatever the order. The transport's watch ends a wait for a peer that fails.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.errors import TransportError, TransportTimeout
from hvd_sparse.hosts.inside import InsideHost, ShardedSum, shard_bounds
from hvd_sparse.ops.pages import ask_for_large_pages
from hvd_sparse.streams import Sum
from hvd_sparse.transports.framing import Awaiting
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.horovod_handles import Pauses
from hvd_sparse.transports.point_to_point import PointToPointTransport

# MERGED hosts.memory
# Memory that the ranks of one host share, without a name in any file system.
#
# Each rank makes a segment by `memfd_create`; the others open it through `/proc/PID/fd/N`, and map
# it. A name under /dev/shm would have to be unlinked, and a rank that is killed before that leaves it
# behind. A container's /dev/shm is often no larger than 64 MB, too. A segment is gone with the last
# process that maps it, however that ends.
#
# Numbers of processes mean the same only among those that see the same ones. So a segment begins with
# 16 random bytes, which its owner tells the others: who maps another's by mistake finds that out.

TOKEN_BYTES = 16
PAGE_BYTES = 4096


class Address(NamedTuple):
    """Where a segment is found, as its owner tells the ranks of its host.

    Attributes:
        pid: The owner's process.
        fd: The segment among its open files.
        nbytes: Size of the segment.
        token: What it begins with, as hexadecimal digits.
    """

    pid: int
    fd: int
    nbytes: int
    token: str


class Segment:
    """One mapping of shared memory, as bytes; it lives as long as tensors view it.

    Attributes:
        data: uint8 `(nbytes,)`, after the page that has the token.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:  # Python's mmap would keep a descriptor of its own open
            self._all = torch.from_file(
                f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8
            )
        except RuntimeError as error:
            raise OSError(f"it cannot be mapped: {error}") from error
        ask_for_large_pages(self._all)
        self.data = self._all[PAGE_BYTES:]

    @property
    def token(self) -> str:
        """What it begins with."""
        return bytes(self._all[:TOKEN_BYTES].numpy()).hex()

    def sign(self, token: str) -> None:
        """Let it begin with a token."""
        self._all[:TOKEN_BYTES] = torch.frombuffer(bytearray.fromhex(token), dtype=torch.uint8)


class OwnSegment:
    """A new segment of this rank, which others can open until `hide`.

    Args:
        nbytes: Bytes that `segment.data` is to have at least.

    Attributes:
        segment: Its mapping here.
        address: Where the others find it.

    Raises:
        OSError: The system has no such memory to give.
    """

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        size = PAGE_BYTES + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._fd = os.memfd_create("hvd_sparse", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            self.segment = Segment(self._fd, size)
        except BaseException:
            self.hide()
            raise
        token = secrets.token_hex(TOKEN_BYTES)
        self.segment.sign(token)
        self.address = Address(os.getpid(), self._fd, size, token)

    def hide(self) -> None:
        """Close the file: who has mapped it keeps the memory, and nobody else can get it."""
        os.close(self._fd)


def open_segment(address: Address) -> Segment:
    """Map another rank's segment.

    Raises:
        OSError: It cannot be found, or another one is in its place.
    """
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != address.nbytes:
            raise OSError(f"process {address.pid} is another one here: its file has another size")
        segment = Segment(fd, address.nbytes)
    finally:
        os.close(fd)
    if segment.token != address.token:
        raise OSError(f"process {address.pid} is another one here: its memory is another")
    return segment


def int64_at(segment: Segment, offset: int) -> Tensor:
    """A number in a segment, int64 `(1,)`, a view."""
    return segment.data[offset : offset + 8].view(torch.int64)


SPIN_S = 1e-4
LINE_BYTES = 64
GRADIENTS_POSTED, STREAM_POSTED, STREAM_BYTES = 0, LINE_BYTES, 2 * LINE_BYTES
"""Offsets of the numbers, each on a cache line of its own."""
GRADIENTS = 4096
"""Offset of the gradients; the stream follows."""
STREAM_HEADER_BYTES = 8


class SharedHost(InsideHost):
    """Through shared memory, one bucket's; see `InsideHost`. Collective over the host.

    Args:
        transport: Connects all ranks; its failures end waits here.
        inside: Connects the ranks of the host.
        numel: n.
        dtype: The gradients' type, as `torch.float32` is spelled.

    Raises:
        TransportError: On every rank of the host, where any of them cannot share memory.
    """

    needs_order = False

    def __init__(
        self, transport: PointToPointTransport, inside: GroupTransport, numel: int, dtype: str
    ) -> None:
        super().__init__(inside.rank, inside.world_size, numel)
        self._transport = transport
        self._ranks, self._own = inside.ranks, inside.rank
        self._dtype: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
        self._nbytes = numel * self._dtype.itemsize
        self._streams_at = GRADIENTS + -(-self._nbytes // LINE_BYTES) * LINE_BYTES
        shards = shard_bounds(numel, inside.world_size)
        longest = max(stop - start for start, stop in pairwise(shards))
        room = STREAM_HEADER_BYTES + longest * torch.float32.itemsize
        self._segments, problem = share(inside, self._streams_at + room)
        if problem:
            raise TransportError(f"the ranks of a host must share memory: {problem}")
        self._sum = ops.new_vector(self.shard_numel, torch.float32, torch.device("cpu"))
        self._gradients = [
            segment.data[GRADIENTS : GRADIENTS + self._nbytes].view(self._dtype)
            for segment in self._segments
        ]
        self._steps = 0

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        """See `InsideHost.reduce_scatter`; what this rank itself adds up need not be copied."""
        starts = [0, *accumulate(gradient.numel() for gradient in gradients)]
        pieces = [
            self._offer(gradient, start) for gradient, start in zip(gradients, starts, strict=False)
        ]
        self._steps += 1
        self._post(GRADIENTS_POSTED)
        self._wait(GRADIENTS_POSTED, "gradients")
        for start, own in filter(None, pieces):
            stop = start + own.numel()
            vectors = [each[start:stop] for each in self._gradients]
            vectors[self._own] = own
            at = start - self.shard.start
            ops.sum_vectors(self._sum[at : at + own.numel()], vectors)
        return self._sum.to(gradients[0].device)

    def _offer(self, gradient: Tensor, start: int) -> tuple[int, Tensor] | None:
        """Let the others read their shards of a gradient.

        Returns:
            Where this rank's own shard of it begins in the bucket, and that part, contiguous and on
            the host; None where it has none.
        """
        place = self._gradients[self._own][start : start + gradient.numel()]
        first, last = (
            min(max(bound - start, 0), gradient.numel())
            for bound in (self.shard.start, self.shard.stop)
        )
        if gradient.is_contiguous() and gradient.device.type == "cpu":
            flat = gradient.view(-1)
            copied(place[:first], flat[:first])
            copied(place[last:], flat[last:])
        else:
            place.view(gradient.shape).copy_(gradient)
            flat = place
        return (start + first, flat[first:last]) if last > first else None

    def gather(self, own: Sum) -> ShardedSum:
        """See `InsideHost.gather`: the sums view the memory."""
        at = self._streams_at
        mine = self._segments[self._own]
        for tensor in self._message(own):
            if tensor.numel():
                data = tensor.view(-1).view(torch.uint8)
                mine.data[at : at + data.numel()].copy_(data)
                at += data.numel()
        int64_at(mine, STREAM_BYTES).fill_(at - self._streams_at)
        self._post(STREAM_POSTED)
        self._wait(STREAM_POSTED, "reduced entries")
        messages = []
        for segment in self._segments:
            nbytes = int(int64_at(segment, STREAM_BYTES))
            messages.append(segment.data[self._streams_at : self._streams_at + nbytes])
        return self._read(messages)

    def _post(self, what: int) -> None:
        ops.post(int64_at(self._segments[self._own], what), self._steps)

    def _wait(self, number: int, what: str) -> None:
        """Wait until all ranks of the host have posted a step's number.

        Raises:
            TransportError: The transport has failed, or one of them did not come.
        """
        places = [int64_at(segment, number) for segment in self._segments]
        if ops.posted(places, self._steps):
            return
        transport, began = self._transport, time.monotonic()
        peers = tuple(rank for rank in self._ranks if rank != transport.rank)
        told = f"{what} of ranks {', '.join(map(str, peers))} of its host in step {self._steps}"
        deadline, pauses = transport.deadline_from(began), Pauses(SPIN_S)
        transport.awaited_beside[id(pauses)] = Awaiting(peers, began, told)
        try:
            while not ops.posted(places, self._steps):
                now = time.monotonic()
                if transport.failure is not None or now >= deadline:
                    late = [
                        str(rank)
                        for rank, place in zip(self._ranks, places, strict=True)
                        if not ops.posted([place], self._steps)
                    ]
                    error = TransportTimeout(
                        f"rank {transport.rank}: rank {', '.join(late)} of its host did not answer "
                        f"within {transport.timeout_s:g} s"
                    )
                    transport.raise_first(
                        error, None, f"it has waited {now - began:.2f} s for {told}"
                    )
                pauses.pause()
        finally:
            del transport.awaited_beside[id(pauses)]


def copied(place: Tensor, values: Tensor) -> None:
    """Copy a vector; a float32 one past the caches, where nobody here looks for it again."""
    if values.dtype == torch.float32:
        ops.sum_vectors(place, [values])
    else:
        place.copy_(values)


def share(inside: GroupTransport, nbytes: int) -> tuple[list[Segment], str]:
    """A segment of each rank of a host, mapped by all of them; collective.

    Args:
        inside: Connects the ranks of the host.
        nbytes: Bytes of each one's `data`, at least.

    Returns:
        The segments in the order of the ranks, and nothing; or on all ranks alike, why any of them
        could not map another's.
    """
    problem = ""
    own: OwnSegment | None = None
    segments: list[Segment] = []
    try:
        own = OwnSegment(nbytes)
    except OSError as error:
        problem = f"cannot make {nbytes} bytes of shared memory ({error})"
    try:
        addresses = _told(inside, None if own is None else own.address)
        if own is not None and all(addresses):
            segments, problem = _mapped(inside, own, addresses)
        problems = _told(inside, problem)
    finally:
        if own is not None:
            own.hide()  # all have mapped it, or never will
    told = zip(inside.ranks, problems, strict=True)
    return segments, "; ".join(f"rank {rank} {why}" for rank, why in told if why)


def _mapped(
    inside: GroupTransport, own: OwnSegment, addresses: Sequence[Sequence[Any]]
) -> tuple[list[Segment], str]:
    """The segments at some addresses, in the order of the ranks; or why one cannot be mapped."""
    segments: list[Segment] = []
    for rank, address in zip(inside.ranks, addresses, strict=True):
        try:
            mine = len(segments) == inside.rank
            segments.append(own.segment if mine else open_segment(Address(*address)))
        except OSError as error:
            return segments, f"cannot map the memory of rank {rank} ({error})"
    return segments, ""


def _told(inside: GroupTransport, mine: object) -> list[Any]:
    """What every rank of the host says."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    messages = inside.allgather((text,), channel="host.memory")
    return [json.loads(bytes(message.numpy())) for message in messages]
