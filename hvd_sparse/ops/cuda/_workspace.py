"""What operations on a device share: tables of segments, zeroed words, and reads by the host.

An operation on a small bucket takes the host longer than the device. So the tables are kept as long
as their gradients stay where they are, zeroed words are cut from a block that was zeroed at once,
and everything that the host has to know comes by one wait.

What is kept belongs to one stream, in whose order it is written, read and let go of.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.ops._arguments import DTYPE_CODES
from hvd_sparse.ops.cuda._launcher import AddressTable
from hvd_sparse.ops.pages import wait_for

TILE = 4096
"""Elements of a tile at most (`kTile` in csrc/cuda/gradients.cuh)."""
NO_GRADIENT = 3
COLUMNS = 5
"""Of a `Segment` (csrc/cuda/gradients.cuh)."""
MOST_TABLES = 256
"""Tables that are kept, those used last; one of 160 segments takes 6 KiB."""
BLOCK_WORDS = 1 << 17
"""64-bit words that are zeroed at once."""
MOST_READ = 16
"""Words that the host reads at once."""

_dtype_of = attrgetter("dtype")


class Workspace:
    """Shared by all threads that call the operations of a device.

    It counts the tables that it made, the blocks that it zeroed, and the host's waits (`reads`).
    """

    def __init__(self) -> None:
        self.tables = self.blocks = self.reads = 0
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[object, ...], tuple[Tensor, int]] = OrderedDict()
        self._zeroed: dict[object, tuple[Tensor, int]] = {}
        self._of_thread = threading.local()
        self._fault: tuple[Tensor, np.ndarray] | None = None

    def segments(
        self, gradients: Sequence[Tensor], numel: int, device: torch.device
    ) -> tuple[AddressTable, int, int]:
        """The table of gradients that lie side by side over `numel` elements of a device.

        Without gradients there is nothing to add. Returns the table, its rows and the number of
        tiles. Empty gradients have no row.
        """
        numels = tuple(map(Tensor.numel, gradients))
        if 0 in numels:
            gradients = [gradient for gradient in gradients if gradient.numel() > 0]
            numels = tuple(filter(None, numels))
        pointers = tuple(map(Tensor.data_ptr, gradients))
        dtypes = tuple(map(_dtype_of, gradients))
        key = (_stream_of(device), pointers, numels or numel, dtypes)
        with self._lock:
            found = self._tables.get(key)
            if found is None:
                host, tiles = _rows(pointers, numels or (numel,), dtypes)
                if device.type == "cuda":
                    # The caching host allocator keeps the pinned block until the copy is done.
                    host = host.pin_memory().to(device, non_blocking=True)
                found = self._tables[key] = (host, tiles)
                self.tables += 1
                if len(self._tables) > MOST_TABLES:
                    self._tables.popitem(last=False)
            else:
                self._tables.move_to_end(key)
        rows, tiles = found
        return AddressTable(rows, gradients), len(rows), tiles

    def zeros(self, words: int, device: torch.device) -> Tensor:
        """Zeroed memory, int64 `(words,)`, which is given to nobody else."""
        if words > BLOCK_WORDS // 8:  # it would leave much of a block unused
            return torch.zeros(words, dtype=torch.int64, device=device)
        stream = _stream_of(device)
        with self._lock:
            block, used = self._zeroed.get(stream, (None, 0))
            if block is None or used + words > BLOCK_WORDS:
                block, used = torch.zeros(BLOCK_WORDS, dtype=torch.int64, device=device), 0
                self.blocks += 1
            self._zeroed[stream] = (block, used + words)
        return block[used : used + words]

    def read(self, *parts: Tensor) -> list[int]:
        """Waits for what was launched on the current stream; returns the parts' words.

        The parts are int64, on one device, of `MOST_READ` words at most.

        Raises:
            ValueError: A kernel that has run by then was given an index out of range.
        """
        self.reads += 1
        device = parts[0].device
        landing = self._landing(device)
        used = 0
        for part in parts:
            landing[used : used + part.numel()].copy_(part, non_blocking=True)
            used += part.numel()
        if device.type == "cuda":
            wait_for(device)
        words: list[int] = landing[:used].tolist()
        self._raise_fault()
        return words

    def fault(self, device: torch.device) -> Tensor:
        """Where kernels tell of an index out of range (`IsIndex` in csrc/cuda/streams.cu)."""
        with self._lock:
            if self._fault is None:
                # The device writes to the host's memory: looking there takes no copy.
                word = torch.zeros(
                    1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu"
                )
                self._fault = (word, word.numpy())
            return self._fault[0]

    def _raise_fault(self) -> None:
        if self._fault is None:
            return
        told = int(self._fault[1][0])
        if told == 0:
            return
        self._fault[1][0] = 0
        index, numel = told >> 32, (told & 0xFFFFFFFF) >> 1
        raise ValueError(
            f"indices must be in [0, {numel}), got {index}: an operation on the device left that "
            "entry out"
        )

    def _landing(self, device: torch.device) -> Tensor:
        """Where this thread's reads arrive."""
        landing: Tensor | None = getattr(self._of_thread, "landing", None)
        if landing is None:
            landing = self._of_thread.landing = torch.empty(
                MOST_READ, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu"
            )
        return landing


def tile_count(numel: int) -> int:
    return -(-numel // TILE)


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _rows(
    pointers: Sequence[int], numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, int]:
    """Rows of `Segment`, and their tiles; without pointers it is one segment with no gradient."""
    rows = np.zeros((len(numels), COLUMNS), np.int64)
    rows[:, 2] = numels
    tiles = -(-rows[:, 2] // TILE)
    rows[1:, 1] = rows[:-1, 2].cumsum()
    rows[1:, 3] = tiles[:-1].cumsum()
    if pointers:
        rows[:, 0] = pointers
        rows[:, 4] = [DTYPE_CODES[dtype] for dtype in dtypes]
    else:
        rows[:, 4] = NO_GRADIENT
    return torch.from_numpy(rows), int(tiles.sum())
