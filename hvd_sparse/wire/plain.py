"""Indices and values as they are in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.cost_model import WireBytes
from hvd_sparse.streams import INDEX_BYTES, Part
from hvd_sparse.wire.messages import (
    DENSE,
    HEADER_BYTES,
    Wire,
    check_ascending,
    check_bytes,
    entry_count,
    header,
)


class PlainWire(Wire):
    """A count of entries (int64), values, and int32 indices unless the part is dense.

    Values are of 4 or 8 bytes; one index stands for a `block` of them, of this shape.
    """

    name = "float32"
    is_lossless = True

    def __init__(self, dtype: torch.dtype = torch.float32, block: Sequence[int] = ()) -> None:
        self.dtype = dtype
        self.block = tuple(block)
        self._value_bytes = dtype.itemsize * torch.Size(block).numel()

    @override
    def encode_and_read(self, part: Part, seed: int) -> tuple[tuple[Tensor, ...], Part]:
        del seed  # nothing is rounded
        if part.indices is None:
            return (header(DENSE), part.values.contiguous()), part
        # Values first: they may need an alignment of 8 bytes.
        return (header(part.nnz), part.values.contiguous(), part.indices.contiguous()), part

    @override
    def decode(self, message: Tensor, start: int, stop: int) -> Part:
        """The part views the message."""
        nnz = entry_count(self.name, message, start, stop)
        body = message[HEADER_BYTES:]
        if nnz == DENSE:
            check_bytes(self.name, "a dense part", body, (stop - start) * self._value_bytes)
            return Part(None, self._values(body), start, stop)
        cut = nnz * self._value_bytes
        check_bytes(self.name, f"{nnz} entries", body, cut + nnz * INDEX_BYTES)
        values, indices = body.tensor_split((cut,))
        indices = indices.view(torch.int32)
        check_ascending(self.name, indices, start, stop)
        return Part(indices, self._values(values), start, stop)

    @override
    def expected_bytes(self, numel: int, k: int) -> WireBytes:
        del numel, k
        value = self._value_bytes
        return WireBytes(INDEX_BYTES, value, value, value)

    def _values(self, data: Tensor) -> Tensor:
        values = data.view(self.dtype)
        return values.view(-1, *self.block) if self.block else values


PLAIN = PlainWire()
"""int32 indices and float32 values."""
