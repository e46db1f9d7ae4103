"""What goes over the wire: indices as bit-packed gaps, values as a few bits each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.ops._arguments import GAP_BLOCK, MAX_NUMEL, bad_index
from hvd_sparse.ops.cuda._passes import KernelFamily, thread_blocks, vector
from hvd_sparse.ops.cuda._workspace import tile_count

GAPS_PER_BLOCK = 1024
"""Entries of a block at a time (`kRoundNumel` in csrc/cuda/gradients.cuh)."""
QUAD = 4


class CudaWire(KernelFamily):
    """As `hvd_sparse.ops.wire`, on checked arguments."""

    def gap_encode(self, indices: Tensor, start: int) -> Tensor:
        """Packs ascending indices; waits for the code's size."""
        nnz, device = indices.numel(), indices.device
        widths, blocks = -(-nnz // GAP_BLOCK), -(-nnz // GAPS_PER_BLOCK)
        header = self._header(blocks, device)
        code = torch.empty(widths + 4 * nnz, dtype=torch.uint8, device=device)
        self._launch("gap_encode", blocks, *vector(indices), np.int64(start), header, code)
        packed_bytes, unordered = self._workspace.read(header[1:3])
        if unordered:
            raise bad_index(f"indices from {start} on", MAX_NUMEL)
        return code[: widths + packed_bytes]

    def gap_decode(self, code: Tensor, nnz: int, start: int, stop: int) -> Tensor:
        """Reads packed indices; waits, to know whether the code was one."""
        device, what = code.device, f"the {nnz} indices of a code"
        widths, blocks = -(-nnz // GAP_BLOCK), -(-nnz // GAPS_PER_BLOCK)
        if code.numel() < widths:
            raise bad_index(what, stop)
        first, second = self._header(blocks, device), self._header(blocks, device)
        indices = torch.empty(nnz, dtype=torch.int32, device=device)
        self._launch(
            *("gap_decode", blocks, *vector(code)),
            *(np.int64(nnz), np.int64(start), first, second, indices),
        )
        packed_bytes, impossible, span = self._workspace.read(first[1:3], second[1:2])
        if impossible or widths + packed_bytes != code.numel() or start - 1 + span >= stop:
            raise bad_index(what, stop)
        return indices

    def qsgd_quantize(
        self, x: Tensor, bits: int, bucket_numel: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        numel, device = x.numel(), x.device
        codes = torch.empty(-(-numel * bits // 8), dtype=torch.uint8, device=device)
        scales = torch.empty(-(-numel // bucket_numel), device=device, dtype=torch.float32)
        self._launch(
            *("qsgd_quantize", tile_count(numel), *vector(x)),
            *(np.uint32(bits), np.uint32(bucket_numel), np.uint64(seed), codes, scales),
        )
        return codes, scales

    def qsgd_dequantize(
        self, codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
    ) -> Tensor:
        x = torch.empty(numel, device=codes.device, dtype=torch.float32)
        self._launch(
            *("qsgd_dequantize", thread_blocks(-(-numel // QUAD)), codes, scales),
            *(np.int64(numel), np.uint32(bits), np.uint32(bucket_numel), x),
        )
        return x
