"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import ClassVar

from torch import Tensor

from hvd_sparse.magnitude import pivot_key, threshold_key
from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.native._accumulation import AccumulationStruct
from hvd_sparse.ops.native._library import (
    NativeLibrary,
    Signatures,
    check,
    empty_stream,
    first,
)


class NativeSelection(NativeLibrary):
    """As `hvd_sparse.ops.selection`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "accumulate_select": (c_void_p, c_uint32, c_int64, c_int64, c_int32, c_void_p),
        "hash_select": (c_void_p, c_uint32, c_int64, c_int32, *(c_uint64,) * 2, c_int32, c_void_p),
        "accumulate_group_topk": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
        "take": (c_void_p, c_void_p, c_int64, c_int32),
        "accumulate_topk": (c_void_p, c_int64, c_uint32, c_int32) + (c_void_p,) * 4,
    }

    def accumulate_select(
        self, accumulation: Accumulation, threshold: float
    ) -> tuple[Tensor, Tensor]:
        """Moves out what reaches the threshold."""
        return self.partition_select(accumulation, threshold, 0, accumulation.numel)

    def partition_select(
        self, accumulation: Accumulation, threshold: float, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Moves out what reaches the threshold in `[start, stop)`."""
        threads = self._thread_count()
        nnz = c_int64()
        self._accumulate(
            self._library.hvds_accumulate_select,
            accumulation,
            threshold_key(threshold),
            start,
            stop,
            threads,
            byref(nnz),
        )
        return self._take(nnz.value, threads)

    def hash_select(
        self,
        accumulation: Accumulation,
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        a: int,
        b: int,
    ) -> tuple[Tensor, Tensor]:
        """Moves out what reaches the threshold and finds a free slot."""
        threads = self._thread_count()
        nnz = c_int64()
        self._accumulate(
            self._library.hvds_hash_select,
            accumulation,
            threshold_key(threshold),
            slots // slots_per_bucket,
            slots_per_bucket,
            a,
            b,
            threads,
            byref(nnz),
        )
        return self._take(nnz.value, threads)

    def accumulate_group_topk(
        self, accumulation: Accumulation, k: int, group_numel: int = 512
    ) -> tuple[Tensor, Tensor]:
        """Moves out the k largest magnitudes of each group."""
        threads = self._thread_count()
        nnz = c_int64()
        self._accumulate(
            self._library.hvds_accumulate_group_topk,
            accumulation,
            k,
            group_numel,
            threads,
            byref(nnz),
        )
        return self._take(nnz.value, threads)

    def accumulate_topk(
        self, accumulation: Accumulation, k: int, pivot: float = 0.0
    ) -> tuple[Tensor, Tensor, float]:
        """Moves out the k largest magnitudes."""
        indices, values = empty_stream(min(k, accumulation.numel))
        nnz, threshold = c_int64(), c_float()
        self._accumulate(
            self._library.hvds_accumulate_topk,
            accumulation,
            k,
            pivot_key(pivot),
            self._thread_count(),
            indices.data_ptr(),
            values.data_ptr(),
            byref(nnz),
            byref(threshold),
        )
        return *first(nnz.value, indices, values), threshold.value

    def _accumulate(
        self, function: Callable[..., int], accumulation: Accumulation, *arguments: object
    ) -> None:
        check(function(byref(AccumulationStruct(accumulation)), *arguments))

    def _take(self, nnz: int, threads: int) -> tuple[Tensor, Tensor]:
        """What this thread's last call has selected."""
        indices, values = empty_stream(nnz)
        check(self._library.hvds_take(indices.data_ptr(), values.data_ptr(), nnz, threads))
        return indices, values
