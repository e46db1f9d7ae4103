"""What the passes over tiles need: the gradients' table, headers, room for streams."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.ops._arguments import Entries
from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.cuda._launcher import THREADS, Argument, Launcher
from hvd_sparse.ops.cuda._workspace import Workspace

HEADER_WORDS = 8
"""64-bit words of a `Header` (csrc/cuda/compact.cuh)."""
ORDERED_TILES = 32
"""Of which one block orders the entries (`kOrderedTiles` in csrc/cuda/compact.cuh)."""


class KernelFamily:
    """A family of operations on CUDA tensors; the launcher makes them run."""

    def __init__(self, launcher: Launcher) -> None:
        self._launch = launcher.launch
        self._workspace = Workspace()

    def _header(self, tiles: int, device: torch.device) -> Tensor:
        """A `Header` and the status words of a pass over `tiles` tiles."""
        return self._workspace.zeros(HEADER_WORDS + tiles, device)

    def _found(self, header: Tensor, entries: Entries) -> Entries:
        """The entries that a pass has found; waits for their number."""
        nnz = self._workspace.read(header[1:2])[0]
        return entries[0][:nnz], entries[1][:nnz]


class AccumulationInputs:
    """An accumulation as the kernels of accumulate.cuh take it.

    Attributes:
        before: What the gradients are added to; the residual, where that is in place.
        buffer_before: The momentum's buffer before, likewise; None without momentum.
        momentum: Buffer (None without momentum), factor, and whether it is Nesterov's.
        table: The segments' table and their number.
        written: Residual, momentum and table, as a kernel takes them that only writes.
        whole: All arguments, in the kernels' order.
    """

    def __init__(self, accumulation: Accumulation, workspace: Workspace) -> None:
        kept = accumulation.before
        self.before: Tensor = accumulation.residual if kept is None else kept.residual
        table, rows, self.tiles = workspace.segments(
            accumulation.gradients, accumulation.numel, accumulation.device
        )
        self.table: tuple[Argument, Argument] = (table, np.int32(rows))
        self.momentum: tuple[Argument, Argument, Argument] = (None, np.float32(0), np.int32(0))
        self.buffer_before: Tensor | None = None
        momentum = accumulation.momentum
        if momentum is not None and table.tensors:  # without gradients u stands still
            buffer = None if kept is None else kept.buffer
            self.buffer_before = momentum.buffer if buffer is None else buffer
            form = np.float32(momentum.factor), np.int32(momentum.nesterov)
            self.momentum = (momentum.buffer, *form)
        self.written: tuple[Argument, ...] = (accumulation.residual, *self.momentum, *self.table)
        self.whole: tuple[Argument, ...] = (self.before, self.buffer_before, *self.written)


def vector(x: Tensor) -> tuple[Argument, Argument]:
    """A vector and its length, as kernels take them."""
    return x, np.int64(x.numel())


def stream(indices: Tensor, values: Tensor) -> tuple[Argument, Argument, Argument]:
    """A stream and its length, as kernels take them."""
    return indices, *vector(values)


def thread_blocks(count: int) -> int:
    """Blocks that have a thread for each of `count` entries."""
    return -(-count // THREADS)


def empty_stream(capacity: int, device: torch.device) -> Entries:
    indices = torch.empty(capacity, dtype=torch.int32, device=device)
    return indices, torch.empty_like(indices, dtype=torch.float32)


class Claims:
    """A pass whose blocks claim room for what they find, in an output of a guessed size.

    What found no room is left as it was, and the same launch again takes it. A block is a tile, or
    a span of some. For the `header`, see csrc/cuda/compact.cuh.
    """

    def __init__(
        self, family: KernelFamily, blocks: int, capacity: int, device: torch.device
    ) -> None:
        self._family = family
        self.blocks = blocks
        self.capacity = capacity
        self._launch = 0
        self._groups = -(-blocks // ORDERED_TILES)
        self.header = family._header(blocks + self._groups, device)
        self._claimed = empty_stream(capacity, device)

    def outputs(self) -> tuple[Argument, ...]:
        """The kernels' last arguments."""
        return np.uint32(self._launch), np.uint64(self.capacity), self.header, *self._claimed

    def in_order(self) -> Entries:
        """Starts to bring the entries into order; room for them, of which nobody waits to know."""
        ordered = empty_stream(self.capacity, self.header.device)
        self._family._launch(
            *("order_tiles", self._groups, self.header, np.int64(self.blocks)),
            *(np.uint64(self.capacity), *self._claimed, *ordered),
        )
        return ordered

    def finish(self, launch: Callable[[Claims], None]) -> Entries:
        """All entries, in order; waits for their number. `launch` is what has started the pass."""
        ordered = self.in_order()
        total, written = self._family._workspace.read(self.header[1:3])
        if total > self.capacity:
            ordered = self.again(launch, total, written)
        return ordered[0][:total], ordered[1][:total]

    def again(self, launch: Callable[[Claims], None], total: int, written: int) -> Entries:
        """The same where there was too little room: the launch takes what it has left."""
        claimed, self._claimed = self._claimed, empty_stream(total, self.header.device)
        for now, before in zip(self._claimed, claimed, strict=True):
            now[:written].copy_(before[:written])
        self.header[1].fill_(written)
        self.capacity = total
        self._launch = 1
        launch(self)
        return self.in_order()
