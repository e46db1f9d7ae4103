"""The dense exchange inside a host through shared memory.

Each rank has a segment for each bucket, which it alone writes: two numbers, its gradients, and its
shard's reduced stream. The numbers count the steps whose gradients and streams have been written.

A rank writes a step's gradients only after it has read all streams of the step before, and its
stream only after all gradients are there. So no rank overwrites what another one still reads, and
no further barrier is needed. Any thread may wait here, beside one that exchanges messages: each
rank comes to each bucket eventually. The transport's watch ends a wait for a peer that fails.

The memory has no name in any file system, which a killed rank would leave behind, and which in a
container often has only 64 MB. Each rank makes a segment by `memfd_create`; the others open it
through `/proc/PID/fd/N`, and map it. It ends with the last process that maps it. Process numbers
mean the same only within one PID namespace, so a segment begins with 16 random bytes, which its
owner tells the others.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.errors import TransportError, TransportTimeout
from hvd_sparse.hosts.inside import InsideHost
from hvd_sparse.ops.pages import ask_for_large_pages
from hvd_sparse.streams import CPU, DenseSum, Sum
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.point_to_point import PointToPointTransport
from hvd_sparse.transports.supervised import Awaiting
from hvd_sparse.transports.transport import gather_json
from hvd_sparse.transports.waiting import Pauses

SPIN_S = 1e-4
LINE_BYTES = 64
GRADIENTS_POSTED, STREAM_POSTED, STREAM_BYTES = 0, LINE_BYTES, 2 * LINE_BYTES
"""Offsets of the numbers, each on its own cache line."""
GRADIENTS = 4096
"""Offset of the gradients; the stream follows them."""
STREAM_HEADER_BYTES = 8
TOKEN_BYTES = 16
PAGE_BYTES = 4096


class SharedHost(InsideHost):
    """One bucket's exchange through shared memory; making it is collective over the host.

    `transport` connects all ranks, and its failures end waits here; `inside` connects the host's.

    Raises:
        TransportError: A rank of the host cannot share memory; on all of them.
    """

    needs_order = False

    def __init__(
        self, transport: PointToPointTransport, inside: GroupTransport, numel: int, dtype: str
    ) -> None:
        super().__init__(inside.rank, inside.world_size, numel)
        self._transport = transport
        self._ranks, self._own = inside.ranks, inside.rank
        of_type: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
        ends_at = GRADIENTS + numel * of_type.itemsize
        self._streams_at = -(-ends_at // LINE_BYTES) * LINE_BYTES
        longest = max(stop - start for start, stop in pairwise(self.bounds))
        room = STREAM_HEADER_BYTES + longest * torch.float32.itemsize
        self._segments, problem = share(inside, self._streams_at + room)
        if problem:
            raise TransportError(f"the ranks of a host must share memory: {problem}")
        self._sum = ops.new_vector(self.shard_numel, torch.float32, torch.device("cpu"))
        self._gradients = [segment[GRADIENTS:ends_at].view(of_type) for segment in self._segments]
        self._steps = 0

    @override
    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Tensor:
        starts = [0, *accumulate(gradient.numel() for gradient in gradients)]
        here = ops.moved(gradients, CPU)
        pieces = [self._offer(each, start) for each, start in zip(here, starts, strict=False)]
        self._steps += 1
        self._post(GRADIENTS_POSTED)
        self._wait(GRADIENTS_POSTED, "gradients")
        for start, own in filter(None, pieces):
            stop = start + own.numel()
            vectors = [each[start:stop] for each in self._gradients]
            vectors[self._own] = own
            at = start - self.shard.start
            ops.on_host().sum_vectors(self._sum[at : at + own.numel()], vectors)
        return ops.moved((self._sum,), gradients[0].device)[0]

    def _offer(self, gradient: Tensor, start: int) -> tuple[int, Tensor] | None:
        """Lets the others read their shards of a gradient.

        Returns where this rank's own shard of it begins in the bucket, and that part, contiguous
        and on the host (often not copied); None where this rank has no part of it.
        """
        place = self._gradients[self._own][start : start + gradient.numel()]
        first, last = (
            min(max(bound - start, 0), gradient.numel())
            for bound in (self.shard.start, self.shard.stop)
        )
        if gradient.is_contiguous():
            flat = gradient.view(-1)
            copied(place[:first], flat[:first])
            copied(place[last:], flat[last:])
        else:
            place.view(gradient.shape).copy_(gradient)
            flat = place
        return (start + first, flat[first:last]) if last > first else None

    @override
    def gather(self, own: Sum) -> DenseSum:
        """`InsideHost.gather`; the sums are views of the memory."""
        at = self._streams_at
        mine = self._segments[self._own]
        for tensor in self._message(own):
            if tensor.numel():
                data = tensor.view(-1).view(torch.uint8)
                mine[at : at + data.numel()].copy_(data)
                at += data.numel()
        int64_at(mine, STREAM_BYTES).fill_(at - self._streams_at)
        self._post(STREAM_POSTED)
        self._wait(STREAM_POSTED, "reduced entries")
        ends = (self._streams_at + int(int64_at(each, STREAM_BYTES)) for each in self._segments)
        pairs = zip(self._segments, ends, strict=True)
        return self._read([segment[self._streams_at : end] for segment, end in pairs])

    def _post(self, what: int) -> None:
        ops.on_host().post(int64_at(self._segments[self._own], what), self._steps)

    def _wait(self, number: int, what: str) -> None:
        """Waits until all ranks of the host have posted a step's number."""
        places = [int64_at(segment, number) for segment in self._segments]
        if ops.on_host().posted(places, self._steps):
            return
        transport, began = self._transport, time.monotonic()
        peers = tuple(rank for rank in self._ranks if rank != transport.rank)
        told = f"{what} of ranks {', '.join(map(str, peers))} of its host in step {self._steps}"
        deadline, pauses = transport.deadline_from(began), Pauses(SPIN_S)
        transport.awaited_beside[id(pauses)] = Awaiting(peers, began, told)
        try:
            while not ops.on_host().posted(places, self._steps):
                now = time.monotonic()
                if transport.failure is not None or now >= deadline:
                    late = [
                        str(rank)
                        for rank, place in zip(self._ranks, places, strict=True)
                        if not ops.on_host().posted([place], self._steps)
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
    """Copies a vector; float32 bypasses the caches, since this rank does not read it again."""
    if values.dtype == torch.float32:
        ops.on_host().sum_vectors(place, [values])
    else:
        place.copy_(values)


def share(inside: GroupTransport, nbytes: int) -> tuple[list[Tensor], str]:
    """Makes a segment of `nbytes` on each rank of a host, and maps all of them; collective.

    Returns the segments in the order of the ranks, and ""; or on all ranks alike, why a rank could
    not map another's.
    """
    problem = ""
    own: OwnSegment | None = None
    segments: list[Tensor] = []
    try:
        own = OwnSegment(nbytes)
    except OSError as error:
        problem = f"cannot make {nbytes} bytes of shared memory ({error})"
    try:
        addresses = gather_json(inside, None if own is None else own.address, "host.memory")
        if own is not None and all(addresses):
            try:
                for rank, address in zip(inside.ranks, addresses, strict=True):
                    mine = rank == inside.ranks[inside.rank]
                    found = own.segment if mine else open_segment(SegmentAddress(*address))
                    segments.append(found)
            except OSError as error:
                problem = f"cannot map the memory of rank {rank} ({error})"
        problems = gather_json(inside, problem, "host.memory")
    finally:
        if own is not None:
            own.hide()  # all ranks have mapped it, or never will
    told = zip(inside.ranks, problems, strict=True)
    return segments, "; ".join(f"rank {rank} {why}" for rank, why in told if why)


class SegmentAddress(NamedTuple):
    """Where the ranks of a host find a segment; `token`, in hexadecimal, is its first bytes."""

    pid: int
    fd: int
    nbytes: int
    token: str


def _mapped(fd: int, nbytes: int) -> Tensor:
    """A file's bytes, the token's page among them; the mapping lives as long as tensors view it."""
    try:  # Python's mmap would keep its own descriptor open
        whole = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"it cannot be mapped: {error}") from error
    ask_for_large_pages(whole)
    return whole


class OwnSegment:
    """A new segment of this rank, at least `nbytes` long, which others can open until `hide`."""

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        size = PAGE_BYTES + -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._fd = os.memfd_create("hvd_sparse", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, size)
            whole = _mapped(self._fd, size)
        except BaseException:
            self.hide()
            raise
        token = secrets.token_hex(TOKEN_BYTES)
        whole[:TOKEN_BYTES] = torch.frombuffer(bytearray.fromhex(token), dtype=torch.uint8)
        self.segment = whole[PAGE_BYTES:]
        self.address = SegmentAddress(os.getpid(), self._fd, size, token)

    def hide(self) -> None:
        """Closes the file: ranks that have mapped it keep the memory, and no other can get it."""
        os.close(self._fd)


def open_segment(address: SegmentAddress) -> Tensor:
    """Maps another rank's segment; OSError where it is not found, or is another one."""
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != address.nbytes:
            raise OSError(f"process {address.pid} is another one here: its file has another size")
        whole = _mapped(fd, address.nbytes)
    finally:
        os.close(fd)
    if bytes(whole[:TOKEN_BYTES].numpy()).hex() != address.token:
        raise OSError(f"process {address.pid} is another one here: its memory is another")
    return whole[PAGE_BYTES:]


def int64_at(segment: Tensor, offset: int) -> Tensor:
    """A number in a segment, int64 `(1,)`, a view."""
    return segment[offset : offset + 8].view(torch.int64)
