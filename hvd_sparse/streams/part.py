"""A stretch of a vector that is sparse until that no longer pays.

Source: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning"
(SC '19), section 5.1, where these are called sparse streams.

With c bytes per index and `isize` per value, nnz entries of N elements take nnz (c + isize) bytes
sparse and N · isize dense; a stretch is dense from nnz (c + isize) >= N · isize on. While two are
combined, nnz is bounded by the sum of theirs, which costs nothing to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, iinfo, inf

from hvd_sparse import ops
from hvd_sparse.streams.stream import SparseStream


@dataclass(frozen=True)
class Operation:
    """An associative operation with a neutral element, which absent entries stand for.

    Two tensors of one shape and type are combined element by element; a type's neutral element
    leaves the other one as it is. The `name` is the same on all ranks.
    """

    name: str
    combine: Callable[[Tensor, Tensor], Tensor]
    neutral: Callable[[torch.dtype], float]


SUM = Operation("sum", torch.add, lambda dtype: 0)
MAX = Operation("max", torch.maximum, lambda t: -inf if t.is_floating_point else iinfo(t).min)
MIN = Operation("min", torch.minimum, lambda t: inf if t.is_floating_point else iinfo(t).max)
OPERATIONS = {operation.name: operation for operation in (SUM, MAX, MIN)}
"""Operations by the names under which a user asks for them."""


INDEX_BYTES = 4
"""c: bytes of one index."""


@dataclass(frozen=True)
class Part:
    """Elements `[start, stop)` of a vector.

    Attributes:
        indices: int32 `(nnz,)`, strictly ascending in `[start, stop)`; None where it is dense.
        values: `(nnz, *block)`, or `(stop - start, *block)` where it is dense. A block is what one
            index stands for: nothing more than a number, or a row of an embedding.
        start: First element.
        stop: One past the last element.
        twin: The same on another device, where it is there, too.
    """

    indices: Tensor | None
    values: Tensor
    start: int
    stop: int
    twin: Part | None = field(default=None, kw_only=True, repr=False, compare=False)

    @staticmethod
    def of(stream: SparseStream, start: int = 0, stop: int | None = None) -> Part:
        """A whole vector, sparse; or of that the elements where the entries lie."""
        stop = stream.numel if stop is None else stop
        twin = None if stream.twin is None else Part.of(stream.twin, start, stop)
        return Part(stream.indices, stream.values, start, stop, twin=twin)

    def to(self, device: torch.device) -> Part:
        """The same on a device, as `SparseStream.to` brings it there."""
        if self.twin is not None and self.twin.values.device.type == device.type:
            return self.twin
        given = (self.values,) if self.indices is None else (self.values, self.indices)
        values, *indices = ops.moved(given, device)
        if values is self.values:
            return self
        return Part(indices[0] if indices else None, values, self.start, self.stop)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nnz(self) -> int:
        """The entries that it holds: all elements, where it is dense."""
        return self.values.shape[0]

    def is_filled_by(self, nnz: int) -> bool:
        """Whether so many entries take no less room sparse than dense."""
        isize = self.values.element_size() * self.values.shape[1:].numel()  # of a block
        return nnz * (INDEX_BYTES + isize) >= self.numel * isize

    def to_dense(self, operation: Operation = SUM) -> Part:
        """The same in dense form, with the neutral element where there are no entries."""
        if self.indices is None:
            return self
        values = self.values
        if self.nnz < self.numel:
            shape = (self.numel, *values.shape[1:])
            values = values.new_full(shape, operation.neutral(values.dtype))
            values.index_copy_(0, self.indices.long() - self.start, self.values)
        return Part(None, values, self.start, self.stop)

    def to_sparse(self, operation: Operation = SUM) -> Part:
        """The same in sparse form; a dense one loses the elements that are neutral."""
        if self.indices is not None:
            return self
        differs = self.values != operation.neutral(self.values.dtype)
        if differs.dim() > 1:
            differs = differs.flatten(1).any(1)
        kept = torch.nonzero(differs).view(-1)
        indices = (kept + self.start).to(torch.int32)
        return Part(indices, self.values[kept], self.start, self.stop)

    def to_stream(self, numel: int, operation: Operation = SUM) -> SparseStream:
        """Its entries as a stream over a vector of `numel` elements."""
        sparse = self.to_sparse(operation)
        assert sparse.indices is not None
        return SparseStream(sparse.indices, sparse.values, numel)

    def slice(self, start: int, stop: int) -> Part:
        """Elements `[start, stop)` of it, as views."""
        if self.indices is None:
            return Part(None, self.values[start - self.start : stop - self.start], start, stop)
        ends = torch.tensor([start, stop], dtype=self.indices.dtype, device="cpu")
        first, last = torch.searchsorted(self.indices, ends).tolist()
        return Part(self.indices[first:last], self.values[first:last], start, stop)


def uniform_regions(numel: int, world_size: int) -> list[tuple[int, int]]:
    """P stretches of a vector that differ by one element at most."""
    ends = [numel * i // world_size for i in range(world_size + 1)]
    return list(pairwise(ends))


def combine(parts: Sequence[Part], operation: Operation = SUM) -> Part:
    """Combine parts of the same stretch, in the order of the list.

    Every merge of two sparse ones first tests whether the result might outgrow the dense form; from
    there on it is dense.
    """
    total = parts[0]
    if len(parts) == 1:
        return total
    nnz_bound = sum(part.nnz for part in parts)
    if all(part.indices is not None for part in parts) and not total.is_filled_by(nnz_bound):
        return _merge(parts, operation)
    left = list(parts[1:])
    while left and total.indices is not None and left[0].indices is not None:
        if total.is_filled_by(total.nnz + left[0].nnz):
            break
        total = _merge([total, left.pop(0)], operation)
    if not left:
        return total
    values = total.to_dense(operation).values
    if values is total.values:
        values = values.clone()
    for part in left:
        if part.indices is None:
            values = operation.combine(values, part.values)
        else:
            places = part.indices.long() - part.start
            values[places] = operation.combine(values[places], part.values)
    return Part(None, values, total.start, total.stop)


def join(parts: Sequence[Part], operation: Operation = SUM) -> Part:
    """Put adjacent parts side by side, in the form that takes less room."""
    first, last = parts[0], parts[-1]
    whole = Part(first.indices, first.values, first.start, last.stop)
    if any(part.indices is None for part in parts) and whole.is_filled_by(
        sum(part.nnz for part in parts)
    ):
        values = torch.cat([part.to_dense(operation).values for part in parts])
        return Part(None, values, whole.start, whole.stop)
    sparse = [part.to_sparse(operation) for part in parts]
    indices = torch.cat([part.indices for part in sparse if part.indices is not None])
    return Part(indices, torch.cat([part.values for part in sparse]), whole.start, whole.stop)


def _merge(parts: Sequence[Part], operation: Operation) -> Part:
    first = parts[0]
    streams = [(part.indices, part.values) for part in parts if part.indices is not None]
    if operation is SUM and first.values.dtype == torch.float32 and first.values.dim() == 1:
        merged = ops.on(first.values.device).merge_sum(streams, first.stop)
        return Part(*merged, first.start, first.stop)
    union = torch.unique(torch.cat([indices for indices, _ in streams]))
    shape = (union.numel(), *first.values.shape[1:])
    values = first.values.new_full(shape, operation.neutral(first.values.dtype))
    for indices, own in streams:
        places = torch.searchsorted(union, indices)
        values[places] = operation.combine(values[places], own)
    return Part(union, values, first.start, first.stop)


@dataclass(frozen=True)
class DenseSum:
    """A sum that came in dense form: adjacent parts that cover it, of which some may be sparse.

    It is written as it is, without becoming a stream. It has a stream's attributes; `indices` and
    `values` cost a pass over the vector, when first asked for. The `parts` are in order.
    """

    parts: tuple[Part, ...]
    numel: int

    @property
    def nnz(self) -> int:
        """Entries that the parts hold: in dense form, every element is one."""
        return sum(part.nnz for part in self.parts)

    @property
    def indices(self) -> Tensor:
        """int32 `(m,)`, of the elements that are not zero."""
        return self._stream.indices

    @property
    def values(self) -> Tensor:
        """float32 `(m,)`, of the same elements."""
        return self._stream.values

    @cached_property
    def _stream(self) -> SparseStream:
        return join(self.parts).to_stream(self.numel)

    def as_stream(self) -> SparseStream:
        return self._stream

    def write(self, out: Tensor, scale: float) -> None:
        """Write the vector times `scale`; as `SparseStream.write` does."""
        for part in self.parts:
            place = out[part.start : part.stop]
            if part.indices is None:
                torch.mul(part.values.to(out.device), scale, out=place)
            else:
                indices = (part.indices - part.start).to(out.device)
                values = part.values.to(out.device) * scale
                ops.on(out.device).decode(place, indices, values)


Sum = SparseStream | DenseSum
"""The result of a reduction."""


def sum_of_parts(parts: Sequence[Part], numel: int) -> Sum:
    """Adjacent parts that cover a vector, in the form that takes less room."""
    whole = Part(None, parts[0].values, 0, numel)
    is_dense = any(part.indices is None for part in parts)
    if is_dense and whole.is_filled_by(sum(part.nnz for part in parts)):
        return DenseSum(tuple(parts), numel)
    return join(parts).to_stream(numel)
