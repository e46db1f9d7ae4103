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


class KernelFamily:
    """A family of operations on CUDA tensors; the launcher makes them run."""

    def __init__(self, launcher: Launcher) -> None:
        self._launch = launcher.launch
        self._workspace = Workspace()

    def _header(self, tiles: int, device: torch.device) -> Tensor:
        """A `Header` and the status words of a pass over `tiles` tiles."""
        return self._workspace.zeros(HEADER_WORDS + tiles, device)

    def _total_of(self, header: Tensor) -> int:
        """The number of entries that a pass has found; waits for it."""
        return self._workspace.read(header[1:2])[0]


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


class OrderedPass:
    """One launch that compacts in order, into room for a guessed number of entries.

    What does not fit is left as it was, from some tile on, and a second launch takes it. For the
    `header`, see csrc/cuda/compact.cuh.
    """

    def __init__(
        self, workspace: Workspace, tiles: int, capacity: int, device: torch.device
    ) -> None:
        self._workspace = workspace
        self.header = workspace.zeros(HEADER_WORDS + tiles, device)
        self.indices, self.values = empty_stream(capacity, device)
        self.capacity = capacity
        self.first_tile = 0
        self.tiles = tiles

    def outputs(self) -> tuple[Argument, ...]:
        """The kernels' last arguments, from `first_tile` on."""
        first, room = np.int64(self.first_tile), np.uint64(self.capacity)
        return first, room, self.header, self.indices, self.values

    def finish(self, launch: Callable[[OrderedPass], None]) -> Entries:
        """All entries; waits for their number.

        If there are more than there was room for, `launch` starts a second pass, which finds them.
        """
        total, stopped, written = self._workspace.read(self.header[1:4])
        if not stopped:
            return self.entries(total)
        tiles, left = self.tiles - (stopped - 1), total - written
        rest = OrderedPass(self._workspace, tiles, left, self.header.device)
        rest.first_tile = self.first_tile + stopped - 1
        launch(rest)
        return (
            torch.cat([self.indices[:written], rest.indices]),
            torch.cat([self.values[:written], rest.values]),
        )

    def entries(self, count: int) -> Entries:
        return self.indices[:count], self.values[:count]
