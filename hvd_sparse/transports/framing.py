"""The form of one message: a 16-byte header, then the payload's bytes.

The receiver has to post a buffer before it knows the size. So both ends derive a capacity from
the size of the last payload that went the same way, on the same channel and for the same bucket. A
payload that outgrows it is cut: the rest follows in a second message.

The header is two 64-bit integers. The first holds the payload's bytes in its lower 48 bits, and a
code of the channel's name in the upper 16. The second, the stamp, holds the number of the call (16
bits), the step (32) and a code of the bucket (16). From these a receiver notices that ranks
disagree.

Ranks that disagree may also differ in their capacities, and gloo ends the process on a message that
is longer than the buffer posted for it. So the capacity is a part of the tag, by which a message
finds its buffer. Capacities have six binary digits after the first: twelve bits encode them.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

HEADER_BYTES = 16
MIN_CAPACITY_BYTES = 4096
SIZE_BITS = 48
CAPACITY_DIGITS = 6
CAPACITY_CODE_BITS = 12

POOLED_BYTES = 64 << 10
"""Smaller buffers are left to torch."""

LIMIT_BYTES = 256 << 20
"""The most that a pool keeps, in use or not."""

_Header = ctypes.c_uint64 * 2

Payload = Sequence[torch.Tensor]
"""Contiguous CPU tensors; they are sent as their bytes, one after the other."""


class Context(NamedTuple):
    """The bucket that the caller of a transport exchanges (empty: none), and its step, from 0.

    It is the same on all ranks; messages and errors carry it.
    """

    bucket: str = ""
    step: int = 0

    def __str__(self) -> str:
        return f"bucket {self.bucket!r}, step {self.step}" if self.bucket else "no bucket"


def payload_nbytes(payload: Payload) -> int:
    """The number of bytes in a payload; TypeError unless it has contiguous CPU tensors."""
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
    """Bytes of the message, header included, after one of `payload_bytes`: 22 to 25 % more."""
    wanted = max(MIN_CAPACITY_BYTES, HEADER_BYTES + payload_bytes + payload_bytes * 11 // 50)
    unit = 1 << (wanted.bit_length() - 1 - CAPACITY_DIGITS)
    return -(-wanted // unit) * unit


def capacity_code(capacity: int) -> int:
    """A capacity in `CAPACITY_CODE_BITS`; another one has another code."""
    exponent = capacity.bit_length() - 1 - CAPACITY_DIGITS
    digits = (capacity >> exponent) & ((1 << CAPACITY_DIGITS) - 1)
    return (exponent << CAPACITY_DIGITS) | digits


@cache
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


class BufferPool:
    """Uninitialised uint8 tensors whose memory is used again once nobody refers to it.

    The C library returns large freed blocks to the operating system. A new buffer then costs a page
    fault for every 4 KiB, which can take longer than the message itself. A block is free when no
    tensor, and no view of one, holds it. One thread takes buffers; any thread may drop them. Torch
    keeps a pool of its own for memory that is `pinned`; small buffers are not.
    """

    def __init__(self) -> None:
        self.pinned = False
        self._blocks: dict[int, list[np.ndarray]] = {}  # by size, powers of two
        self._kept_bytes = 0
        self._unreferenced = _references([np.empty(0)], 0)

    def take(self, nbytes: int) -> torch.Tensor:
        """A tensor of `nbytes` bytes, 16-byte aligned at least."""
        if nbytes < POOLED_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self.pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        block_bytes = 1 << (nbytes - 1).bit_length()
        blocks = self._blocks.setdefault(block_bytes, [])
        for i in range(len(blocks)):
            if _references(blocks, i) == self._unreferenced:
                return torch.from_numpy(blocks[i])[:nbytes]
        if self._kept_bytes + block_bytes > LIMIT_BYTES:
            self._drop_unreferenced()
        if self._kept_bytes + block_bytes > LIMIT_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        block = np.empty(block_bytes, dtype=np.uint8)
        blocks.append(block)
        self._kept_bytes += block_bytes
        return torch.from_numpy(block)[:nbytes]

    def _drop_unreferenced(self) -> None:
        for block_bytes, blocks in self._blocks.items():
            for i in reversed(range(len(blocks))):
                if _references(blocks, i) == self._unreferenced:
                    del blocks[i]
                    self._kept_bytes -= block_bytes


def _references(blocks: list[np.ndarray], i: int) -> int:
    return sys.getrefcount(blocks[i])
