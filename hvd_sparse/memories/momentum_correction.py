"""Momentum correction: the memory of Deep Gradient Compression.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887).

Symbols: g gradient, u momentum, v velocity (the residual of momentum SGD), m the momentum's factor.

Steps, for every element:
  1. u = m u + g; v = v + u. Nesterov: u = m (u + g); v = v + u + g.
  2. A selector takes entries out of v.
  3. Where an entry was applied, u = 0 too (momentum factor masking), so that
     momentum which is older than what was sent does not push on.

Cost: 20 bytes of memory traffic per element in one pass; masking is O(k).

Departures:
  * Only entries that were applied lose their momentum. One that was taken and came back (outside
    the global top k of Ok-Topk, say) is as if it had not been taken.
  * Masking waits until the next step begins: only then is it known what was applied.
  * While everything is sent (density 1, in a warm-up) nothing is masked: v is u then, and the sum
    over the ranks is exactly momentum SGD's. With masking it would be SGD without momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.memories.error_feedback import ErrorFeedback


class MomentumCorrection(ErrorFeedback):
    """v, which is the `residual`, and u of one bucket.

    The law of `ErrorFeedback` holds for v, with u (Nesterov: u + g) in the place of the gradient.

    `momentum` is m, in (0, 1). Where v fades, as in `ErrorFeedback`, u is left alone.

    Attributes:
        momentum_buffer: u, float32 `(n,)`; masked only when the next step begins, or by `tensors`.
            Another tensor in every step, as the residual is.
    """

    HELD = ("residual", "momentum_buffer")

    def __init__(
        self,
        numel: int,
        device: torch.device,
        momentum: float,
        nesterov: bool = False,
        **fading: float,
    ) -> None:
        super().__init__(numel, device, **fading)
        self.momentum = momentum
        self.nesterov = nesterov
        self.momentum_buffer = ops.zero_vector(numel, torch.float32, device)
        self._lossless = False

    def mask(self) -> None:
        """Momentum factor masking: u = 0 where the last step's entries were applied."""
        if not self._lossless:
            self._mask_taken()
            for each in self._taken_elsewhere:
                self.momentum_buffer.index_fill_(0, each.indices.long(), 0.0)
        self._forget()

    @override
    def tensors(self) -> dict[str, Tensor]:
        self.mask()
        return {"residual": self.residual, "momentum": self.momentum_buffer}

    @override
    def _begin(self, k: int) -> None:
        self.mask()
        self._lossless = k == self.residual.numel()

    def _mask_taken(self) -> None:
        """Mask what was taken and did not come back whole; waits for no device."""
        taken, returned = self._taken, self._returned.to(self.residual.device)
        if taken.nnz and returned.nnz:
            place = torch.searchsorted(returned.indices, taken.indices).clamp_(max=returned.nnz - 1)
            came_back = returned.indices[place] == taken.indices
            came_back &= returned.values[place] == taken.values
            indices = taken.indices.long()
            kept = torch.where(came_back, self.momentum_buffer[indices], 0.0)
            self.momentum_buffer[indices] = kept
        elif taken.nnz:
            self.momentum_buffer.index_fill_(0, taken.indices.long(), 0.0)

    @override
    def _accumulation(self, gradients: Sequence[Tensor], before: ops.Before) -> ops.Accumulation:
        momentum = ops.Momentum(self.momentum_buffer, self.momentum, self.nesterov)
        return ops.Accumulation(self.residual, gradients, momentum, before)
