"""Local gradient clipping, before gradients are accumulated.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887): each of
P ranks clips its own gradient to P^(-1/2) times the limit that the sum over the ranks would have,
since the norm of a sum of P independent gradients grows with the root of P.

Departure: the norm is that of one bucket. The norm over the whole model is not known before the
last gradient has come, and by then the first buckets have been exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipping:
    """A limit on the norm of a bucket's gradient.

    Attributes:
        max_norm: The limit on the L2 norm of the ranks' sum, above 0.
        world_size: P.
    """

    max_norm: float
    world_size: int

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Scale gradients in place where they are too long together; non-finite ones stay."""
        if not gradients:
            return
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        limit = self.max_norm / math.sqrt(self.world_size)
        if math.isfinite(norm) and norm > limit:
            for gradient in gradients:
                gradient.mul_(limit / norm)
