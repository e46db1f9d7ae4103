"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import ClassVar

from torch import Tensor

from hvd_sparse.ops import reference
from hvd_sparse.ops._checks import pivot_key, threshold_key
from hvd_sparse.ops.momentum import Momentum
from hvd_sparse.ops.native._library import NativeLibrary, Signatures, check, empty_stream, segments


class NativeSelection(NativeLibrary):
    """As `hvd_sparse.ops.selection`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "accumulate_select": (c_void_p, c_int64, c_void_p, c_int64, c_uint32, c_int32, c_void_p),
        "take": (c_void_p, c_void_p, c_int64, c_int32),
        "accumulate_topk": (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_uint32, c_int32)
        + (c_void_p,) * 4,
    }

    accumulate_group_topk = staticmethod(reference.accumulate_group_topk)
    partition_select = staticmethod(reference.partition_select)
    hash_select = staticmethod(reference.hash_select)

    def accumulate_select(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        threshold: float,
        momentum: Momentum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Adds, and moves out what reaches the threshold."""
        if momentum is not None:
            return reference.accumulate_select(residual, gradients, threshold, momentum)
        threads = self._thread_count()
        nnz = c_int64()
        check(
            self._library.hvds_accumulate_select(
                residual.data_ptr(),
                residual.numel(),
                *segments(gradients),
                threshold_key(threshold),
                threads,
                byref(nnz),
            )
        )
        indices, values = empty_stream(nnz.value)
        check(self._library.hvds_take(indices.data_ptr(), values.data_ptr(), nnz.value, threads))
        return indices, values

    def accumulate_topk(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        k: int,
        pivot: float = 0.0,
        momentum: Momentum | None = None,
    ) -> tuple[Tensor, Tensor, float]:
        """Adds, and moves out the k largest magnitudes."""
        if momentum is not None:
            return reference.accumulate_topk(residual, gradients, k, pivot, momentum)
        indices, values = empty_stream(min(k, residual.numel()))
        nnz, threshold = c_int64(), c_float()
        check(
            self._library.hvds_accumulate_topk(
                residual.data_ptr(),
                residual.numel(),
                *segments(gradients),
                k,
                pivot_key(pivot),
                self._thread_count(),
                indices.data_ptr(),
                values.data_ptr(),
                byref(nnz),
                byref(threshold),
            )
        )
        return indices[: nnz.value], values[: nnz.value], threshold.value
