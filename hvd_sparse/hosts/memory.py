"""Memory that the ranks of one host share, without a name in any file system.

Each rank makes a segment by `memfd_create`; the others open it through `/proc/PID/fd/N`, and map
it. A name under /dev/shm would have to be unlinked, and a rank that is killed before that leaves it
behind. A container's /dev/shm is often no larger than 64 MB, too. A segment is gone with the last
process that maps it, however that ends.

Numbers of processes mean the same only among those that see the same ones. So a segment begins with
16 random bytes, which its owner tells the others: who maps another's by mistake finds that out.
"""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_sparse.ops.pages import ask_for_large_pages

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
