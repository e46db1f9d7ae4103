"""Streams, and their way back to a dense vector."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64, c_uint32, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.magnitude import threshold_key
from hvd_sparse.ops._layout import DTYPE_CODES
from hvd_sparse.ops.native._library import (
    NativeLibrary,
    Signatures,
    check,
    empty_stream,
    first,
)


class NativeStreams(NativeLibrary):
    """As `hvd_sparse.ops.streams`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "merge_sum": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p),
        "difference": (c_void_p, c_void_p, c_int64, c_void_p, c_int64) + (c_void_p,) * 3,
        "unapplied": (c_void_p, c_void_p, c_int64) * 2 + (c_void_p, c_int64) + (c_void_p,) * 3,
        "threshold_stream": (c_void_p, c_void_p, c_int64, c_uint32) + (c_void_p,) * 3,
        "scatter_add": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32),
        "take_at": (c_void_p, c_int64, c_void_p, c_int64, c_int32, c_void_p),
        "decode": (c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_int32),
    }

    def merge_sum(
        self, streams: Sequence[tuple[Tensor, Tensor]], numel: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of streams, in the order of the list."""
        table: list[int] = []
        room = 0
        for indices, values in streams:
            count = indices.numel()
            table += (indices.data_ptr(), values.data_ptr(), count)
            room += count
        out_indices, out_values = empty_stream(room)
        nnz = c_int64()
        check(
            self._library.hvds_merge_sum(
                (c_int64 * len(table))(*table),
                len(streams),
                numel,
                self._thread_count(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            ),
            "the indices of every stream",
            numel,
        )
        return first(nnz.value, out_indices, out_values)

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The entries whose index is not in `other`."""
        out_indices, out_values = empty_stream(indices.numel())
        nnz = c_int64()
        check(
            self._library.hvds_difference(
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                other.data_ptr(),
                other.numel(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return first(nnz.value, out_indices, out_values)

    def unapplied(
        self, sent: tuple[Tensor, Tensor], lost: tuple[Tensor, Tensor], applied: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What an exchange leaves with its sender."""
        out_indices, out_values = empty_stream(sent[0].numel() + lost[0].numel())
        nnz = c_int64()
        check(
            self._library.hvds_unapplied(
                sent[0].data_ptr(),
                sent[1].data_ptr(),
                sent[0].numel(),
                lost[0].data_ptr(),
                lost[1].data_ptr(),
                lost[0].numel(),
                applied.data_ptr(),
                applied.numel(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return first(nnz.value, out_indices, out_values)

    def threshold_stream(
        self, indices: Tensor, values: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor]:
        """The entries that reach the threshold."""
        out_indices, out_values = empty_stream(indices.numel())
        nnz = c_int64()
        check(
            self._library.hvds_threshold_stream(
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                threshold_key(threshold),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return first(nnz.value, out_indices, out_values)

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None:
        """Adds a stream to a vector."""
        check(
            self._library.hvds_scatter_add(
                x.data_ptr(),
                x.numel(),
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                self._thread_count(),
            ),
            "indices",
            x.numel(),
        )

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        """Writes a stream as a dense vector."""
        check(
            self._library.hvds_decode(
                out.data_ptr(),
                DTYPE_CODES[out.dtype],
                out.numel(),
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                self._thread_count(),
            ),
            "indices",
            out.numel(),
        )

    def take_at(self, x: Tensor, indices: Tensor) -> Tensor:
        """Moves entries out of a vector."""
        values = torch.empty(indices.numel(), dtype=torch.float32)
        self._take_at(x, indices, values.data_ptr())
        return values

    def zero_at(self, x: Tensor, indices: Tensor) -> None:
        """Zeroes entries of a vector."""
        self._take_at(x, indices, None)

    def _take_at(self, x: Tensor, indices: Tensor, values: int | None) -> None:
        """Zeroes, after copying to the address `values` if there is one."""
        check(
            self._library.hvds_take_at(
                x.data_ptr(),
                x.numel(),
                indices.data_ptr(),
                indices.numel(),
                self._thread_count(),
                values,
            ),
            "indices",
            x.numel(),
        )
