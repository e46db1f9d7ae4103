"""What a threshold is estimated from."""

from __future__ import annotations

from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.native._accumulation import AccumulationStruct
from hvd_sparse.ops.native._library import NativeLibrary, Signatures, check


class NativeEstimation(NativeLibrary):
    """As `hvd_sparse.ops.estimation`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "kth_magnitude": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
        "sample_accumulator": (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int64),
    }

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """The k-th largest magnitude."""
        magnitude = c_float()
        check(
            self._library.hvds_kth_magnitude(
                x.data_ptr(), x.numel(), k, self._thread_count(), byref(magnitude)
            )
        )
        return magnitude.value

    def sample_accumulator(
        self, accumulation: Accumulation, start: int, stride: int, run: int = 1
    ) -> Tensor:
        """Magnitudes of some of the sums."""
        struct = AccumulationStruct(accumulation)
        whole_strides, rest = divmod(max(0, accumulation.numel - start), stride)
        sample = torch.empty(whole_strides * run + min(rest, run), dtype=torch.float32)
        check(
            self._library.hvds_sample_accumulator(
                byref(struct),
                start,
                stride,
                run,
                self._thread_count(),
                sample.data_ptr(),
                sample.numel(),
            )
        )
        return sample
