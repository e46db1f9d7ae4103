"""What a threshold is estimated from."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.ops._checks import threshold_key
from hvd_sparse.ops.moments import Moments
from hvd_sparse.ops.momentum import Momentum
from hvd_sparse.ops.native._library import NativeLibrary, Signatures, check
from hvd_sparse.ops.native._source import Source


class NativeEstimation(NativeLibrary):
    """As `hvd_sparse.ops.estimation`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "kth_magnitude": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
        "sample_accumulator": (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int64),
        "accumulator_moments": (c_void_p, c_uint32, c_int32, c_void_p, c_void_p),
        "count_at_least": (c_void_p, c_void_p, c_int64, c_int32, c_void_p),
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
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        start: int,
        stride: int,
        run: int = 1,
        momentum: Momentum | None = None,
    ) -> Tensor:
        """Magnitudes of some of the sums."""
        source = Source(residual, gradients, momentum)
        whole_strides, rest = divmod(max(0, residual.numel() - start), stride)
        sample = torch.empty(whole_strides * run + min(rest, run), dtype=torch.float32)
        check(
            self._library.hvds_sample_accumulator(
                byref(source),
                start,
                stride,
                run,
                self._thread_count(),
                sample.data_ptr(),
                sample.numel(),
            )
        )
        return sample

    def accumulator_moments(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        threshold: float = 0.0,
        momentum: Momentum | None = None,
    ) -> Moments:
        """Moments of the finite sums that reach the threshold."""
        source = Source(residual, gradients, momentum)
        count, sums = c_int64(), (c_double * 5)()
        check(
            self._library.hvds_accumulator_moments(
                byref(source), threshold_key(threshold), self._thread_count(), byref(count), sums
            )
        )
        return Moments(count.value, *sums)

    def count_at_least(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        thresholds: Sequence[float],
        momentum: Momentum | None = None,
    ) -> list[int]:
        """How many of the sums reach each threshold."""
        source = Source(residual, gradients, momentum)
        keys = (c_uint32 * len(thresholds))(*map(threshold_key, thresholds))
        counts = (c_uint64 * len(thresholds))()
        check(
            self._library.hvds_count_at_least(
                byref(source), keys, len(thresholds), self._thread_count(), counts
            )
        )
        return list(counts)
