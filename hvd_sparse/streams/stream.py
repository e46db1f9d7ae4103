"""Sparse streams: what selectors give and collectives exchange.

Whoever makes a `SparseStream` answers for its tensors. Operations on it are not checked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.magnitude import INFINITE_KEY, magnitude_keys

ENTRY_BYTES = 8
"""Bytes of one entry on the wire: an int32 index and a float32 value (COO, two words)."""


@dataclass(frozen=True)
class SparseStream:
    """A sparse vector in coordinate form.

    Attributes:
        indices: int32 `(nnz,)`, strictly ascending, each in `[0, numel)`.
        values: float32 `(nnz,)`.
        numel: Length of the vector it stands for, below 2**31.
        twin: The same entries on another device, where they are there, too.
    """

    indices: Tensor
    values: Tensor
    numel: int
    twin: SparseStream | None = field(default=None, kw_only=True, repr=False, compare=False)

    @property
    def nnz(self) -> int:
        """Number of entries held."""
        return self.indices.numel()

    @property
    def home(self) -> torch.device:
        """Where sums of it are taken: the device of its twin, if it has one."""
        return self.indices.device if self.twin is None else self.twin.indices.device

    @property
    def _ops(self) -> ops.Ops:
        return ops.on(self.indices.device)

    def slice(self, start: int, stop: int) -> SparseStream:
        """Entries number `start` up to `stop`, as views."""
        twin = None if self.twin is None else self.twin.slice(start, stop)
        indices, values = self.indices[start:stop], self.values[start:stop]
        return SparseStream(indices, values, self.numel, twin=twin)

    def payload(self) -> tuple[Tensor, Tensor]:
        """The parts of this stream's message."""
        return (self.indices, self.values)

    def isfinite(self) -> bool:
        """Whether every value is finite."""
        if self.nnz == 0:
            return True
        (largest,) = ops.moved((magnitude_keys(self.values).max(),), ops.CPU)
        return int(largest) < INFINITE_KEY

    def finite(self) -> SparseStream:
        """The finite entries: all of them, as a rule, and then this very stream.

        On a CUDA device, where counting them takes a wait, the others become -0.0.
        """
        if self.indices.device.type == "cuda":
            neutral = self.values.where(self.values.isfinite(), -0.0)
            return SparseStream(self.indices, neutral, self.numel)
        return self if self.isfinite() else self.where(self.values.isfinite())

    def where(self, kept: Tensor) -> SparseStream:
        """The entries where a bool tensor `(nnz,)` is true."""
        return SparseStream(self.indices[kept], self.values[kept], self.numel)

    def largest(self, count: int) -> SparseStream:
        """So many entries of the largest magnitudes, ties to the lower index; all, if fewer.

        Where there are more, zeros are never among them.
        """
        if self.nnz <= count:
            return self
        order, values, _ = ops.accumulate_topk(ops.Accumulation(self.values.clone()), count)
        return SparseStream(self.indices[order.long()], values, self.numel)

    def split_largest(self, count: int) -> tuple[SparseStream, SparseStream]:
        """The `largest` entries, and the rest."""
        if self.nnz <= count:
            return self, SparseStream.empty(self.numel)
        kept = self.largest(count)
        return kept, self.without(kept.indices)

    def without(self, indices: Tensor) -> SparseStream:
        """The entries whose index is not among others, int32 `(m,)` strictly ascending."""
        rest = self._ops.difference(*self.payload(), indices)
        return SparseStream(*rest, self.numel)

    def reaching(self, threshold: float) -> SparseStream:
        """The entries that reach a threshold, as `ops.accumulate_select` understands it."""
        passing = self._ops.threshold_stream(*self.payload(), threshold)
        return SparseStream(*passing, self.numel)

    def to(self, device: torch.device | str) -> SparseStream:
        """The same stream on a device; itself, where it is there.

        Between the host and a CUDA device it goes through pinned memory. Only the way to the host
        is waited for.
        """
        target = torch.device(device)
        if self.twin is not None and self.twin.indices.device.type == target.type:
            return self.twin
        indices, values = ops.moved(self.payload(), target)
        return self if indices is self.indices else SparseStream(indices, values, self.numel)

    def as_stream(self) -> SparseStream:
        """This stream; a `DenseSum` becomes one."""
        return self

    def write(self, out: Tensor, scale: float) -> None:
        """Write the vector times `scale` over `out`, rounded to nearest even.

        `out` is float32, float16 or bfloat16 `(numel,)`, on any device.
        """
        scaled = self.times(scale).to(out.device)
        ops.on(out.device).decode(out, *scaled.payload())

    def add_to(self, x: Tensor) -> None:
        """Add every entry to a float32 vector `(numel,)` on the same device, in place."""
        ops.on(x.device).scatter_add(x, *self.payload())

    def times(self, factor: float) -> SparseStream:
        """Every value multiplied by a factor."""
        return SparseStream(self.indices, self.values * factor, self.numel)

    @staticmethod
    def empty(numel: int) -> SparseStream:
        """A stream without entries."""
        indices = torch.empty(0, dtype=torch.int32, device="cpu")
        return SparseStream(indices, torch.empty(0, dtype=torch.float32, device="cpu"), numel)

    @staticmethod
    def concatenate(streams: Sequence[SparseStream], numel: int) -> SparseStream:
        """Streams over disjoint, ascending ranges, one after the other."""
        indices, values = zip(*(stream.payload() for stream in streams), strict=True)
        return SparseStream(torch.cat(indices), torch.cat(values), numel)


def sum_of(streams: Sequence[SparseStream], numel: int) -> SparseStream:
    """The sum of any number of streams, over a vector of `numel` elements."""
    filled = [stream for stream in streams if stream.nnz] or streams[:1]  # where it is
    if not filled:
        return SparseStream.empty(numel)
    if len(filled) == 1:
        return SparseStream(*filled[0].payload(), numel)
    return merge(filled, numel)


def merge(streams: Sequence[SparseStream], numel: int) -> SparseStream:
    """The sum of at least one stream, in the order of the list and in memory of its own."""
    entries = [stream.payload() for stream in streams]
    merged = ops.on(entries[0][0].device).merge_sum(entries, numel)
    return SparseStream(*merged, numel)


def unapplied(
    sent: SparseStream, lost: Sequence[SparseStream], applied: SparseStream
) -> SparseStream:
    """What goes back to a rank after an exchange: entries without part in it, and roundings.

    Of what it `sent`, entries at indices that were applied stay out. What it dropped on the way, or
    rounding lost in its messages, counts there alone; elsewhere the entries go back whole to
    whoever brought them.
    """
    device = applied.indices.device
    sent, rest = sent.to(device), sum_of(lost, sent.numel)
    left = sent.without(applied.indices)
    if rest.nnz:
        strangers = rest.without(applied.indices)
        left = sum_of([left, rest.without(strangers.indices)], sent.numel)
    return left
