"""Memory for large messages that is used again.

What the C library frees goes back to the operating system when it is large. A new buffer then costs
a page fault for every 4 KiB, which can take longer than the message itself.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

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
