"""The form of one message: a 16-byte header, then the payload's bytes.

The receiver has to post a buffer before it knows what comes. Both ends therefore derive its
capacity from the size of the last payload that went the same way, on the same channel and for the
same bucket, and no sizes are exchanged beforehand. A payload that outgrows the capacity is cut: the
rest follows as a second message, whose size the header of the first has told.

The header is two 64-bit integers. The first has the payload's bytes in its lower 48 bits, and a
code of the channel's name in the upper 16. The second, the stamp, has the number of the call (16
bits), the step (32) and a code of the bucket (16). By these a receiver notices that ranks disagree.

Ranks that disagree may differ in their capacities, too, and gloo ends the process on a message that
is longer than the buffer posted for it. So the capacity is a part of the tag, by which a message
finds its buffer: the two only ever meet where both ends have named the same capacity. Capacities
have six binary digits after the first, so that twelve bits tell them exactly.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

# MERGED transports.buffers
# Memory for large messages that is used again.
#
# What the C library frees goes back to the operating system when it is large. A new buffer then costs
# a page fault for every 4 KiB, which can take longer than the message itself.

POOLED_BYTES = 64 << 10
"""Smaller buffers are left to torch."""

LIMIT_BYTES = 256 << 20
"""What a pool keeps at most, in use or not."""


class BufferPool:
    """Uninitialised uint8 tensors whose memory returns here once nobody refers to it.

    There is nothing to give back: a block is free when no tensor, and no view of one, holds it.
    One thread takes; any may let go.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[np.ndarray]] = {}  # by size, powers of two
        self._kept_bytes = 0
        self._unreferenced = _references([np.empty(0)], 0)

    def take(self, nbytes: int) -> torch.Tensor:
        """A tensor of `nbytes` bytes, 16-byte aligned at least."""
        if nbytes < POOLED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        block_bytes = 1 << (nbytes - 1).bit_length()
        blocks = self._blocks.setdefault(block_bytes, [])
        for i in range(len(blocks)):
            if _references(blocks, i) == self._unreferenced:
                return torch.from_numpy(blocks[i])[:nbytes]
        if self._kept_bytes + block_bytes > LIMIT_BYTES:
            self._drop_unreferenced()
        if self._kept_bytes + block_bytes > LIMIT_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8)
        block = np.empty(block_bytes, dtype=np.uint8)
        blocks.append(block)
        self._kept_bytes += block_bytes
        return torch.from_numpy(block)[:nbytes]

    def _drop_unreferenced(self) -> None:
        for block_bytes, blocks in self._blocks.items():
            held = [
                blocks[i]
                for i in range(len(blocks))
                if _references(blocks, i) != self._unreferenced
            ]
            self._kept_bytes -= (len(blocks) - len(held)) * block_bytes
            blocks[:] = held


class PinnedPool(BufferPool):
    """The same in pinned memory, which torch keeps and gives again when no copy is under way."""

    def take(self, nbytes: int) -> torch.Tensor:
        """See `BufferPool.take`; small buffers are not pinned."""
        if nbytes < POOLED_BYTES:
            return super().take(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _references(blocks: list[np.ndarray], i: int) -> int:
    return sys.getrefcount(blocks[i])


# MERGED transports.position
# Where a rank is: in which bucket and step, in which call of its transport, and what it waits for.
#
# Messages carry a short form of it (`framing`), errors say it, and ranks that wait long ask their
# peers for it (`watch`).


class Context(NamedTuple):
    """What the caller of a transport is at, the same on all ranks.

    Attributes:
        bucket: A name of the bucket that is exchanged; empty where there is none.
        step: Its step, from 0.
    """

    bucket: str = ""
    step: int = 0

    def __str__(self) -> str:
        """As messages say it."""
        return f"bucket {self.bucket!r}, step {self.step}" if self.bucket else "no bucket"


NO_CONTEXT = Context()

NUMBER_BITS = 40
"""Bits of a call's number that count; those above tell the kind of a group (`group`)."""


class Call(NamedTuple):
    """One call of `exchange`, as a rank made it.

    Attributes:
        number: Its place in the sequence of calls, which is the same on all ranks.
        channel: The purpose of its messages.
        context: What the caller was at.
        dst: The rank that it sends to, or None.
        src: The rank that it receives from, or None.
        sends_up_to: Bytes that its first message may have; both ends must think the same.
        takes_up_to: The same of the message that it receives.
    """

    number: int
    channel: str
    context: Context
    dst: int | None
    src: int | None
    sends_up_to: int = 0
    takes_up_to: int = 0

    def __str__(self) -> str:
        """As messages say it."""
        return (
            f"call {self.number % (1 << NUMBER_BITS)} on channel {self.channel!r} ({self.context})"
        )


@dataclass(frozen=True)
class Awaiting:
    """What a rank waits for.

    Attributes:
        peers: The ranks that it waits for.
        since: When it began to, a value of `time.monotonic()`.
        what: The same in words.
        call: The call that waits, or None where the medium has no calls of its own.
        receives: Whether it waits for a message; else for room for its own.
    """

    peers: tuple[int, ...]
    since: float
    what: str
    call: Call | None = None
    receives: bool = True


def disagreement(rank: int, awaiting: Awaiting, peer: int, theirs: Call) -> str | None:
    """Why a peer's call of the same number will never end a wait, or None where it will.

    Args:
        rank: The rank that waits.
        awaiting: What it waits for.
        peer: The rank that it waits for.
        theirs: The peer's call of the same number.
    """
    mine = awaiting.call
    assert mine is not None
    if (theirs.channel, theirs.context) != (mine.channel, mine.context):
        reason = f"rank {peer} made {theirs}"
    elif awaiting.receives and theirs.dst != rank:
        reason = f"rank {peer} sent its message of that call to {_name(theirs.dst)}"
    elif not awaiting.receives and theirs.src != rank:
        reason = f"rank {peer} awaits a message from {_name(theirs.src)} in that call"
    elif awaiting.receives and theirs.sends_up_to != mine.takes_up_to:
        reason = (
            f"rank {peer} sends up to {theirs.sends_up_to} bytes in that call, where this rank has "
            f"made room for {mine.takes_up_to}"
        )
    elif not awaiting.receives and theirs.takes_up_to != mine.sends_up_to:
        reason = (
            f"rank {peer} has made room for {theirs.takes_up_to} bytes in that call, where this "
            f"rank sends up to {mine.sends_up_to}"
        )
    else:
        return None
    return reason


def _name(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"


Answer = dict[str, Any]
"""What a rank tells a peer that asks: its failure, what it awaits and for how many seconds it has
been at that, the seconds it has waited for Horovod, and its call of the number that was asked."""

NOTHING: Answer = {"failure": None, "awaits": None, "for_s": 0.0, "horovod_s": 0.0, "did": None}


def stuck_s(answer: Answer, waited_s: float) -> float:
    """How long a rank has waited for one that itself waits for Horovod, and exchanges nothing.

    Who waits for Horovod has begun every exchange that its peers have begun: they came past the
    same operations of Horovod's. So this one does not wait for what the others wait for.
    """
    if answer["awaits"] is not None:
        return 0.0
    return min(waited_s, float(answer["for_s"]), float(answer["horovod_s"]))


def in_words(peer: int, answer: Answer) -> str:
    """What a peer is at."""
    if answer["awaits"] is not None:
        return f"rank {peer} waits itself, {answer['for_s']:.1f} s for {answer['awaits']}"
    if answer["horovod_s"] > 0:
        return f"rank {peer} waits for Horovod, {answer['horovod_s']:.1f} s"
    return f"rank {peer} is alive, and busy elsewhere for {answer['for_s']:.1f} s"


HEADER_BYTES = 16
MIN_CAPACITY_BYTES = 4096
SIZE_BITS = 48
CAPACITY_DIGITS = 6
CAPACITY_CODE_BITS = 12

_Header = ctypes.c_uint64 * 2

Payload = Sequence[torch.Tensor]
"""Contiguous CPU tensors; they are sent as their bytes, one after the other."""


def payload_nbytes(payload: Payload) -> int:
    """The number of bytes in a payload.

    Raises:
        TypeError: The payload is no sequence of contiguous CPU tensors.
    """
    if isinstance(payload, torch.Tensor):
        raise TypeError(
            "a payload is a sequence of tensors, got one tensor: wrap it, as in (tensor,)"
        )
    total = 0
    for tensor in payload:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a payload is a sequence of tensors, got an element {type(tensor)}")
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise TypeError(
                "a payload's tensors must be contiguous and on the CPU, got one on "
                f"{tensor.device} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )
        total += tensor.nbytes
    return total


def next_capacity(payload_bytes: int) -> int:
    """Bytes that a message may have, header included, after one that had `payload_bytes`.

    From 22 to 25 % more than that one had.
    """
    wanted = max(MIN_CAPACITY_BYTES, HEADER_BYTES + payload_bytes + payload_bytes * 11 // 50)
    unit = 1 << (wanted.bit_length() - 1 - CAPACITY_DIGITS)
    return -(-wanted // unit) * unit


def capacity_code(capacity: int) -> int:
    """A capacity in `CAPACITY_CODE_BITS`; another one has another code."""
    exponent = capacity.bit_length() - 1 - CAPACITY_DIGITS
    digits = (capacity >> exponent) & ((1 << CAPACITY_DIGITS) - 1)
    return (exponent << CAPACITY_DIGITS) | digits


def name_code(name: str) -> int:
    """A 16-bit code of a channel's or a bucket's name."""
    return zlib.crc32(name.encode()) & 0xFFFF


def stamp(call: int, step: int, bucket_code: int) -> int:
    """The second half of a header."""
    return (bucket_code << 48) | ((step & 0xFFFF_FFFF) << 16) | (call & 0xFFFF)


def read_stamp(value: int) -> tuple[int, int, int]:
    """The call (its lower 16 bits), the step and the bucket's code."""
    return value & 0xFFFF, (value >> 16) & 0xFFFF_FFFF, value >> 48


def frame(
    payload: Payload, payload_bytes: int, code: int, stamped: int, pool: BufferPool
) -> torch.Tensor:
    """Copies a payload into one message of `HEADER_BYTES + payload_bytes` bytes, uint8."""
    message = pool.take(HEADER_BYTES + payload_bytes)
    address = message.data_ptr()
    header = _Header.from_address(address)
    header[0], header[1] = (code << SIZE_BITS) | payload_bytes, stamped
    _copy_into(address + HEADER_BYTES, payload)
    return message


def read_header(message: torch.Tensor) -> tuple[int, int, int]:
    """The payload's bytes, the channel's code and the stamp, from the first message of a frame."""
    first, stamped = _Header.from_address(message.data_ptr())
    return first & ((1 << SIZE_BITS) - 1), first >> SIZE_BITS, stamped


def flatten(payload: Payload, pool: BufferPool) -> torch.Tensor:
    """A copy of the payload's bytes as one uint8 tensor."""
    flat = pool.take(payload_nbytes(payload))
    _copy_into(flat.data_ptr(), payload)
    return flat


def _copy_into(address: int, payload: Payload) -> None:
    # memmove releases the interpreter's lock and costs a fraction of a torch call on small tensors.
    for tensor in payload:
        nbytes = tensor.nbytes
        if nbytes:
            ctypes.memmove(address, tensor.data_ptr(), nbytes)
            address += nbytes
