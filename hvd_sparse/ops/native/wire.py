"""What goes over the wire."""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64, c_uint64, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.ops._layout import MAX_NUMEL
from hvd_sparse.ops.native._library import NativeLibrary, Signatures, check


class NativeWire(NativeLibrary):
    """As `hvd_sparse.ops.wire`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "gap_block": (),
        "gap_encode": (c_void_p, c_int64, c_int32, c_void_p, c_void_p),
        "gap_decode": (c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p),
        "qsgd_quantize": (c_void_p, c_int64, c_int32, c_int64, c_uint64, c_int32) + (c_void_p,) * 2,
        "qsgd_dequantize": (c_void_p, c_void_p, c_int64, c_int32, c_int64, c_int32, c_void_p),
    }

    def gap_encode(self, indices: Tensor, start: int) -> Tensor:
        """Packs ascending indices."""
        nnz = indices.numel()
        widths = -(-nnz // self._library.hvds_gap_block())
        code = torch.empty(widths + 4 * nnz, dtype=torch.uint8)
        used = c_int64()
        check(
            self._library.hvds_gap_encode(
                indices.data_ptr(), nnz, start, code.data_ptr(), byref(used)
            ),
            f"indices from {start} on",
            MAX_NUMEL,
        )
        return code[: used.value]

    def gap_decode(self, code: Tensor, nnz: int, start: int, stop: int) -> Tensor:
        """Reads packed indices."""
        indices = torch.empty(nnz, dtype=torch.int32)
        check(
            self._library.hvds_gap_decode(
                code.data_ptr(), code.numel(), nnz, start, stop, indices.data_ptr()
            ),
            f"the {nnz} indices of a code",
            stop,
        )
        return indices

    def qsgd_quantize(
        self, x: Tensor, bits: int, bucket_numel: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Rounds to levels."""
        codes = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
        scales = torch.empty(-(-x.numel() // bucket_numel))
        check(
            self._library.hvds_qsgd_quantize(
                x.data_ptr(),
                x.numel(),
                bits,
                bucket_numel,
                seed,
                self._thread_count(),
                codes.data_ptr(),
                scales.data_ptr(),
            )
        )
        return codes, scales

    def qsgd_dequantize(
        self, codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
    ) -> Tensor:
        """The values of levels."""
        x = torch.empty(numel)
        check(
            self._library.hvds_qsgd_dequantize(
                codes.data_ptr(),
                scales.data_ptr(),
                numel,
                bits,
                bucket_numel,
                self._thread_count(),
                x.data_ptr(),
            )
        )
        return x
