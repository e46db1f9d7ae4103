"""The form of one message: an 8-byte header, then the payload's bytes.

The receiver has to post a buffer before it knows what comes. Both ends therefore derive its
capacity from the size of the last payload that went the same way on the same channel, and no sizes
are exchanged beforehand. A payload that outgrows the capacity is cut: the rest follows as a second
message, whose size the header of the first has told.

The header is one 64-bit integer: the payload's bytes in the lower 48 bits, and a code of the
channel's name in the upper 16, by which a receiver notices that ranks disagree on their calls.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

import torch

from hvd_sparse.transports.buffers import BufferPool

HEADER_BYTES = 8
MIN_CAPACITY_BYTES = 4096
SIZE_BITS = 48

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
    """Bytes that a message may have, header included, after one that had `payload_bytes`."""
    wanted = HEADER_BYTES + payload_bytes + payload_bytes // 4
    return max(MIN_CAPACITY_BYTES, -(-wanted // 512) * 512)


def channel_code(channel: str) -> int:
    """A 16-bit code of a channel's name."""
    return zlib.crc32(channel.encode()) & 0xFFFF


def frame(payload: Payload, payload_bytes: int, code: int, pool: BufferPool) -> torch.Tensor:
    """Copies a payload into one message of `HEADER_BYTES + payload_bytes` bytes, uint8."""
    message = pool.take(HEADER_BYTES + payload_bytes)
    address = message.data_ptr()
    ctypes.c_uint64.from_address(address).value = (code << SIZE_BITS) | payload_bytes
    _copy_into(address + HEADER_BYTES, payload)
    return message


def read_header(message: torch.Tensor) -> tuple[int, int]:
    """The payload's bytes and the channel's code, from the first message of a frame."""
    header = ctypes.c_uint64.from_address(message.data_ptr()).value
    return header & ((1 << SIZE_BITS) - 1), header >> SIZE_BITS


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
