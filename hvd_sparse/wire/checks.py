"""What a message must be before it is read: it may have been damaged, or be one of another wire.

Nothing is allocated by a count that the message's own bytes do not bear out.
"""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from hvd_sparse.errors import MessageError

HEADER_BYTES = 8
DENSE = -1
"""The header of a dense part's message, in place of a count of entries."""


def header(count: int) -> Tensor:
    """What a message begins with: a number of entries, or `DENSE`."""
    written = torch.empty(1, dtype=torch.int64)
    c_int64.from_address(written.data_ptr()).value = count
    return written


def entry_count(wire: str, message: Tensor, start: int, stop: int) -> int:
    """What the header says: a number of entries that `[start, stop)` has room for, or `DENSE`.

    Raises:
        MessageError: It says something else, or there is none.
    """
    if message.numel() < HEADER_BYTES:
        raise MessageError(
            f"a message of wire {wire!r} must have at least {HEADER_BYTES} bytes, "
            f"got {message.numel()}"
        )
    count = c_int64.from_address(message.data_ptr()).value
    if count != DENSE and not 0 <= count <= stop - start:
        raise MessageError(
            f"a message of wire {wire!r} claims {count} entries in [{start}, {stop})"
        )
    return count


def check_bytes(wire: str, what: str, body: Tensor, expected: int) -> None:
    """Checks the length of what follows a header.

    Raises:
        MessageError: It has another length.
    """
    if body.numel() != expected:
        raise MessageError(
            f"a message of wire {wire!r} with {what} must have {expected} bytes after its header, "
            f"got {body.numel()}"
        )


def check_ascending(wire: str, indices: Tensor, start: int, stop: int) -> None:
    """Checks int32 indices `(nnz,)`, in one pass.

    Raises:
        MessageError: They do not ascend strictly, or leave `[start, stop)`.
    """
    if indices.numel() == 0:
        return
    places = indices.numpy()  # torch would share this small work among threads
    is_inside = start <= places[0] and places[-1] < stop
    if not (is_inside and (places[1:] > places[:-1]).all()):
        raise MessageError(
            f"the indices in a message of wire {wire!r} must be strictly ascending in "
            f"[{start}, {stop})"
        )
