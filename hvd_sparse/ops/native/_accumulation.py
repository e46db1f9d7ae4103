"""What is accumulated, as the C interface takes it."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p, cast
from typing import ClassVar

from hvd_sparse.ops._layout import DTYPE_CODES
from hvd_sparse.ops.accumulation import Accumulation


class AccumulationStruct(Structure):
    """`HvdsAccumulation` of csrc/cpu/api.h. The tensors must outlive it."""

    _fields_: ClassVar = [
        ("residual", c_void_p),
        ("n", c_int64),
        ("segments", c_void_p),
        ("segment_count", c_int64),
        ("buffer", c_void_p),
        ("factor", c_float),
        ("nesterov", c_int32),
        ("before_residual", c_void_p),
        ("before_buffer", c_void_p),
    ]

    def __init__(self, accumulation: Accumulation) -> None:
        table: list[int] = []
        for gradient in accumulation.gradients:
            table += (gradient.data_ptr(), gradient.numel(), DTYPE_CODES[gradient.dtype])
        self._segments = (c_int64 * len(table))(*table)  # kept alive
        super().__init__(
            residual=accumulation.residual.data_ptr(),
            n=accumulation.numel,
            segments=cast(self._segments, c_void_p),
            segment_count=len(accumulation.gradients),
        )
        momentum = accumulation.momentum
        if momentum is not None:
            self.buffer = momentum.buffer.data_ptr()
            self.factor = momentum.factor
            self.nesterov = momentum.nesterov
        before = accumulation.before
        if before is not None:
            self.before_residual = before.residual.data_ptr()
            if before.buffer is not None:
                self.before_buffer = before.buffer.data_ptr()
