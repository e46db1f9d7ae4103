"""Streams, and their way back to a dense vector.

The other implementations refuse an index out of range. Here its entry is left out, and the next
operation that waits raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.magnitude import threshold_key
from hvd_sparse.ops._arguments import DTYPE_CODES, Entries
from hvd_sparse.ops.cuda._launcher import Argument
from hvd_sparse.ops.cuda._passes import KernelFamily, empty_stream, stream, thread_blocks, vector
from hvd_sparse.ops.cuda._workspace import tile_count

DECODED_BYTES = 1 << 15
"""Of a block (`kDecodedBytes` in csrc/cuda/streams.cu)."""
WORDS_PER_BLOCK = 1024
"""Words of a bitmap that a block ranks (`kRoundNumel` in csrc/cuda/gradients.cuh)."""


class CudaStreams(KernelFamily):
    """As in `hvd_sparse.ops.reference`."""

    def merge_sum(self, streams: Sequence[Entries], numel: int) -> Entries:
        """The sum of streams, in the order of the list.

        A bitmap of the union tells every index its place; the streams are then added one by one.
        """
        device = streams[0][0].device
        words = -(-numel // 32)
        bitmap = torch.zeros(words, dtype=torch.int32, device=device)
        before = torch.empty(words, dtype=torch.int32, device=device)
        for indices, _ in streams:
            self._launch(
                *("mark_indices", thread_blocks(indices.numel()), *vector(indices)),
                *(np.int64(numel), bitmap, self._workspace.fault(device)),
            )
        blocks = -(-words // WORDS_PER_BLOCK)
        header = self._header(blocks, device)
        self._launch("rank_words", blocks, bitmap, np.int64(words), header, before)
        merged, total = empty_stream(sum(indices.numel() for indices, _ in streams), device)
        total.fill_(-0.0)  # the neutral element of a float sum: 0.0 + -0.0 would lose a sign
        for indices, values in streams:
            self._launch(
                *("add_stream", thread_blocks(indices.numel()), *stream(indices, values)),
                *(np.int64(numel), bitmap, before, merged, total),
            )
        return self._found(header, (merged, total))

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> Entries:
        return self._filter("keep_absent", indices, values, *vector(other))

    def threshold_stream(self, indices: Tensor, values: Tensor, threshold: float) -> Entries:
        return self._filter("keep_large", indices, values, np.uint32(threshold_key(threshold)))

    def _filter(
        self, kernel: str, indices: Tensor, values: Tensor, *arguments: Argument
    ) -> Entries:
        """The entries that a kernel keeps; waits for their number."""
        numel, device = indices.numel(), indices.device
        header = self._header(tile_count(numel), device)
        kept = empty_stream(numel, device)
        entries = stream(indices, values)
        self._launch(kernel, tile_count(numel), *entries, *arguments, header, *kept)
        return self._found(header, kept)

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None:
        self._launch(
            *("scatter_add", thread_blocks(indices.numel())),
            *(*vector(x), *stream(indices, values), self._workspace.fault(x.device)),
        )

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        self._launch(
            *("decode", max(-(-out.nbytes // DECODED_BYTES), min(1, indices.numel()))),
            *(out, np.int32(DTYPE_CODES[out.dtype]), np.int64(out.numel())),
            *(*stream(indices, values), self._workspace.fault(out.device)),
        )

    def take_at(self, x: Tensor, indices: Tensor) -> Tensor:
        values = torch.empty(indices.numel(), device=x.device, dtype=torch.float32)
        self._launch(
            *("clear_at", thread_blocks(indices.numel())),
            *(*vector(x), *vector(indices), values, self._workspace.fault(x.device)),
        )
        return values
