"""How gradients enter the accumulator, as a choice that can be compared and written down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvd_sparse.memories.error_feedback import ErrorFeedback, Fading
from hvd_sparse.memories.global_momentum import GlobalMomentum
from hvd_sparse.memories.momentum_correction import MomentumCorrection

MOMENTUM_KINDS = ("local", "global")


@dataclass(frozen=True)
class MemoryOptions:
    """A memory, and what is done to gradients on their way into it.

    Attributes:
        momentum: m, in [0, 1); 0: plain error feedback.
        nesterov: Whether that momentum is Nesterov's.
        clip_norm: Limit on the norm of the whole gradient that the optimizer sees, of which each
            rank clips its own (engine/clipping.py); None: none.
        momentum_kind: "local": each rank's own, by DGC's momentum correction; "global": that of
            what all ranks applied.
        low_pass: β of ScaleCom's filter, in (0, 1]; 1: none.
        residual_decay: What a residual is multiplied by in each step, in (0, 1].
    """

    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None
    momentum_kind: str = "local"
    low_pass: float = 1.0
    residual_decay: float = 1.0

    @property
    def momentum_unit(self) -> float:
        """What the memory's momentum is multiplied by, beside that of heavy-ball SGD.

        DGC's form of Nesterov's momentum keeps m times it.
        """
        is_ahead = self.nesterov and self.momentum_kind == "local"
        return self.momentum if is_ahead and self.momentum > 0 else 1.0

    def make(self, numel: int, device: torch.device, world_size: int) -> ErrorFeedback:
        """One bucket's memory."""
        fading = Fading(self.low_pass, self.residual_decay)
        if self.momentum == 0.0:
            return ErrorFeedback(numel, device, fading)
        if self.momentum_kind == "global":
            return GlobalMomentum(numel, device, world_size, self.momentum, self.nesterov, fading)
        return MomentumCorrection(numel, device, self.momentum, self.nesterov, fading)
