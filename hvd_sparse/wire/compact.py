"""Messages in fewer bytes: narrow values, and indices as bit-packed gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.part import INDEX_BYTES, Part
from hvd_sparse.transports import Payload
from hvd_sparse.wire.base import Wire
from hvd_sparse.wire.plain import DENSE, HEADER_BYTES, PLAIN
from hvd_sparse.wire.values import VALUE_CODECS, ValueCodec

INDEX_FORMS = ("int32", "gap")


class CompactWire(Wire):
    """A count of entries (int64), int32 indices, values, gap-coded indices; either kind of indices.

    A dense part has no indices. Gaps are counted from the part's first element, so they are as
    short in a region as in the whole vector (`ops.gap_encode`).

    Args:
        values: Name of a form of values: a key of `VALUE_CODECS`.
        indices: "int32" or "gap".
        dense_values: Form of a dense part's values; None for that of the others.
    """

    def __init__(
        self, values: str, indices: str = "int32", dense_values: str | None = None
    ) -> None:
        self.name = f"{values}+{indices}" + (f" dense {dense_values}" if dense_values else "")
        self._values: ValueCodec = VALUE_CODECS[values]
        self._dense_values = VALUE_CODECS[dense_values or values]
        self._has_gaps = indices == "gap"
        self.is_lossless = self._values.is_lossless and self._dense_values.is_lossless

    def encode(self, part: Part, seed: int) -> Payload:
        """See `Wire.encode`."""
        if part.indices is None:
            header = torch.tensor([DENSE])
            return (header, *self._dense_values.encode(part.values, seed))
        header = torch.tensor([part.nnz])
        values = self._values.encode(part.values, seed)
        if self._has_gaps:
            return (header, *values, ops.gap_encode(part.indices.contiguous(), part.start))
        return (header, part.indices.contiguous(), *values)

    def decode(self, message: Tensor, start: int, stop: int) -> Part:
        """See `Wire.decode`."""
        count = int(message[:HEADER_BYTES].view(torch.int64))
        body = message[HEADER_BYTES:]
        if count == DENSE:
            return Part(None, self._dense_values.decode(body, stop - start), start, stop)
        if self._has_gaps:
            cut = self._values.nbytes(count)
            indices = ops.gap_decode(body[cut:], count, start, stop)
            return Part(indices, self._values.decode(body[:cut], count), start, stop)
        cut = INDEX_BYTES * count
        indices = body[:cut].view(torch.int32)
        return Part(indices, self._values.decode(body[cut:], count), start, stop)


def make_wire(values: str = "float32", indices: str = "int32") -> Wire:
    """The wire of the given forms of values and indices."""
    if (values, indices) == ("float32", "int32"):
        return PLAIN
    return CompactWire(values, indices)
