"""Messages in fewer bytes: narrow values, and indices as bit-packed gaps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.cost_model import WireBytes
from hvd_sparse.errors import MessageError
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
from hvd_sparse.wire.plain import PLAIN
from hvd_sparse.wire.values import VALUE_CODECS, ValueCodec, flat_message

INDEX_BITS = 31
"""Indices are below 2**31."""


class CompactWire(Wire):
    """A count of entries (int64), then int32 indices and values, or values and gap-coded indices.

    A dense part has no indices. Gaps are counted from the part's first element, so they are as
    short in a region as in the whole vector: `gap_encode` in `ops/reference.py`. Forms of
    `values`, and of a dense part's where it has another, are keys of `VALUE_CODECS`.
    """

    def __init__(
        self,
        values: str,
        indices: Literal["int32", "gap"] = "int32",
        dense_values: str | None = None,
    ) -> None:
        self.name = values + ("+gap" if indices == "gap" else "")
        if dense_values is not None:
            self.name += f", dense {dense_values}"
        self._values: ValueCodec = VALUE_CODECS[values]
        self._dense_values = VALUE_CODECS[dense_values or values]
        self._has_gaps = indices == "gap"
        self.is_lossless = self._values.is_lossless and self._dense_values.is_lossless

    @override
    def encode_and_read(self, part: Part, seed: int) -> tuple[tuple[Tensor, ...], Part]:
        """Encodes values once and reads them alone; indices are not read again."""
        codec = self._dense_values if part.indices is None else self._values
        values = codec.encode(part.values, seed)
        message: tuple[Tensor, ...] = (header(DENSE), *values)
        if part.indices is not None and self._has_gaps:
            code = ops.on_host().gap_encode(part.indices.contiguous(), part.start)
            message = (header(part.nnz), *values, code)
        elif part.indices is not None:
            message = (header(part.nnz), part.indices.contiguous(), *values)
        if self.is_lossless:
            return message, part
        read = codec.decode(flat_message(values), part.nnz)
        return message, Part(part.indices, read, part.start, part.stop)

    @override
    def decode(self, message: Tensor, start: int, stop: int) -> Part:
        count = entry_count(self.name, message, start, stop)
        body = message[HEADER_BYTES:]
        if count == DENSE:
            numel = stop - start
            check_bytes(self.name, "a dense part", body, self._dense_values.nbytes(numel))
            return Part(None, self._dense_values.decode(body, numel), start, stop)
        values_bytes = self._values.nbytes(count)
        if self._has_gaps:
            indices = self._read_gaps(body[values_bytes:], count, start, stop)
            check_bytes(self.name, f"{count} entries", body[:values_bytes], values_bytes)
            return Part(indices, self._values.decode(body[:values_bytes], count), start, stop)
        cut = INDEX_BYTES * count
        check_bytes(self.name, f"{count} entries", body, cut + values_bytes)
        indices = body[:cut].view(torch.int32)
        check_ascending(self.name, indices, start, stop)
        return Part(indices, self._values.decode(body[cut:], count), start, stop)

    @override
    def expected_bytes(self, numel: int, k: int) -> WireBytes:
        """A sum of several ranks' entries has shorter gaps."""
        k, numel = max(1, k), max(1, numel)
        return WireBytes(
            gap_index_bytes(k / numel) if self._has_gaps else INDEX_BYTES,
            self._values.nbytes(k) / k,
            self._dense_values.nbytes(numel) / numel,
        )

    @override
    def encode_indices(self, indices: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Gaps come after their number (int64)."""
        if not self._has_gaps:
            return super().encode_indices(indices, numel)
        return (header(indices.numel()), ops.on_host().gap_encode(indices.contiguous(), 0))

    @override
    def decode_indices(self, message: Tensor, numel: int) -> Tensor:
        if not self._has_gaps:
            return super().decode_indices(message, numel)
        count = entry_count(self.name, message, 0, numel)
        if count == DENSE:
            raise MessageError(f"a message of wire {self.name!r} with indices claims to be dense")
        return self._read_gaps(message[HEADER_BYTES:], count, 0, numel)

    def _read_gaps(self, code: Tensor, count: int, start: int, stop: int) -> Tensor:
        try:
            return ops.on_host().gap_decode(code, count, start, stop)
        except ValueError as error:
            raise MessageError(
                f"{code.numel()} bytes in a message of wire {self.name!r} are no code of {count} "
                f"strictly ascending indices in [{start}, {stop})"
            ) from error


def gap_index_bytes(density: float) -> float:
    """Bytes of a gap-coded index where every element is an entry with a probability, in [0, 1].

    A gap reaches g with (1 - density)^g, and a block has the bits of its largest one.
    """
    reach = [(1 - density) ** (1 << bits) for bits in range(INDEX_BITS)]
    width = sum(1 - (1 - odds) ** ops.GAP_BLOCK for odds in reach)
    return width / 8 + 1 / ops.GAP_BLOCK


WIRES: dict[str, Wire] = {
    wire.name: wire
    for wire in [
        PLAIN,
        *(CompactWire(values) for values in VALUE_CODECS if values != PLAIN.name),
        *(CompactWire(values, indices="gap") for values in VALUE_CODECS),
        CompactWire("float32", dense_values="qsgd4"),
        CompactWire("float32", indices="gap", dense_values="qsgd4"),
    ]
}
"""Wires by the names under which a user asks for them: "float16", "float16+gap", …

"float32, dense qsgd4" is that of SparCML's Algorithm 1: QSGD where a sum has become dense."""
