"""What a threshold is estimated from."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.magnitude import key_magnitude
from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.cuda._passes import AccumulationInputs, KernelFamily, thread_blocks, vector
from hvd_sparse.ops.cuda._workspace import tile_count

DIGITS = 3
"""Of a key, from the top (csrc/cuda/topk.cu)."""
DESCENT_WORDS = (32 + DIGITS * 2048 * 4) // 8
"""64-bit words of a `Descent` there."""
KEY = slice(1, 2)
"""The word of it that is the k-th key."""
MOST_COUNTING_BLOCKS = 1024


class CudaEstimation(KernelFamily):
    """As `hvd_sparse.ops.estimation`, on checked arguments."""

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """As that of `reference.py`; part of an exact top-k, and waited for."""
        return key_magnitude(self._workspace.read(self._descend(x, k)[KEY])[0])

    def sample_accumulator(
        self, accumulation: Accumulation, runs: int, run_numel: int, seed: int
    ) -> Tensor:
        inputs = AccumulationInputs(accumulation, self._workspace)
        return self._sample(inputs, runs, run_numel, seed)

    def _sample(self, inputs: AccumulationInputs, runs: int, run_numel: int, seed: int) -> Tensor:
        device, samples = inputs.before.device, runs * run_numel
        magnitudes = torch.empty(samples, device=device, dtype=torch.float32)
        places = np.int64(inputs.before.numel() // run_numel)
        self._launch(
            *("sample_accumulator", thread_blocks(samples)),
            *(inputs.before, inputs.buffer_before, *inputs.momentum[1:], *inputs.table),
            *(places, np.int64(runs), np.int64(run_numel), np.uint64(seed), magnitudes),
        )
        return magnitudes

    def _descend(self, x: Tensor, k: int, passed: Tensor | None = None) -> Tensor:
        """Starts a radix descent to the k-th largest key of `x`, k > 0.

        `x` is float32 `(n,)`, or room for what a pass leaves; if by the header of that, `passed`,
        it does not leave k entries, the key is 0. Returns the `Descent` (csrc/cuda/topk.cu), int64
        `(DESCENT_WORDS,)`, on the device.
        """
        descent = self._workspace.zeros(DESCENT_WORDS, x.device)
        for digit in range(DIGITS):
            self._launch(
                *("count_digits", min(tile_count(x.numel()), MOST_COUNTING_BLOCKS)),
                *(*vector(x), passed, np.uint64(k), np.uint32(digit), descent),
            )
        return descent
