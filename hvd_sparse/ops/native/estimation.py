"""What a threshold is estimated from."""

from __future__ import annotations

from ctypes import byref, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

from torch import Tensor

from hvd_sparse.ops import reference
from hvd_sparse.ops.native._library import NativeLibrary, Signatures, check


class NativeEstimation(NativeLibrary):
    """As `hvd_sparse.ops.estimation`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "kth_magnitude": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
    }

    sample_accumulator = staticmethod(reference.sample_accumulator)
    accumulator_moments = staticmethod(reference.accumulator_moments)
    count_at_least = staticmethod(reference.count_at_least)

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """The k-th largest magnitude."""
        magnitude = c_float()
        check(
            self._library.hvds_kth_magnitude(
                x.data_ptr(), x.numel(), k, self._thread_count(), byref(magnitude)
            )
        )
        return magnitude.value
