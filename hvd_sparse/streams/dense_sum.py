"""A sum that came in dense form: it is written as it is, and never becomes a stream by the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.streams.part import Part, join
from hvd_sparse.streams.stream import SparseStream


@dataclass(frozen=True)
class DenseSum:
    """A float32 vector as adjacent parts that cover it, of which some may be sparse.

    It has the attributes of a `SparseStream`. `indices` and `values` cost a pass over the vector,
    when first asked for.

    Attributes:
        parts: In order; nobody may change them.
        numel: Length of the vector.
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
        """The same as a stream."""
        return self._stream

    def isfinite(self) -> bool:
        """Whether every value is finite."""
        for part in self.parts:
            if part.values.numel():
                low, high = torch.aminmax(part.values)  # NaN goes through
                if not bool(low.isfinite() & high.isfinite()):
                    return False
        return True

    def write(self, out: Tensor, scale: float) -> None:
        """Write the vector times `scale`; see `SparseStream.write`."""
        for part in self.parts:
            place = out[part.start : part.stop]
            if part.indices is None:
                torch.mul(part.values.to(out.device), scale, out=place)
            else:
                indices = (part.indices - part.start).to(out.device)
                ops.decode(place, indices, part.values.to(out.device) * scale)


Sum = SparseStream | DenseSum
"""What a reduction gives."""


def sum_of_parts(parts: Sequence[Part], numel: int) -> Sum:
    """Adjacent parts that cover a vector, in the form that takes less room."""
    whole = Part(None, parts[0].values, 0, numel)
    is_dense = any(part.indices is None for part in parts)
    if is_dense and whole.is_filled_by(sum(part.nnz for part in parts)):
        return DenseSum(tuple(parts), numel)
    return join(parts).to_stream(numel)
