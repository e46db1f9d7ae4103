"""Memories: how gradients enter the accumulator, and what stays there after the exchange.

A compressor is a memory, a selector and a collective; any three go together, since each knows only
its neighbour's contract:

1. `memory.accumulate(gradients, k, scope)` begins a step and returns an `Accumulator`: what the
   memory holds plus the step's gradients (`hvd_sparse/accumulator.py`). The first operation on it
   adds the gradients, in the same pass over memory that takes entries out.
2. A selector takes entries out of the accumulator, within 10 % of k (Gaussiank and the hard
   threshold are less exact), inside the `Scope` that the collective gives this rank. Entries that
   are not finite always leave. Beyond four times k the smallest go back: no rank sends more.
3. A collective sums the ranks' entries. One that sums at other ranks' indices (ExDyna, CLT-k)
   takes more entries out by `memory.take_at(indices)`.
4. `memory.give_back(taken, returned)` adds what had no part in the sum to the residual, and
   `memory.applied(reduced)` tells the memory what was applied.

Until the next step begins, `roll_back` undoes all of it, bit for bit. In exact arithmetic, summed
over the ranks, residual before + what entered = what was applied + residual after. What enters is
the gradient, or with momentum what each module's first lines say. `low_pass` and `residual_decay`
depart from this law by intent, and count by how much.

Momentum is kept as each rank's share of heavy-ball SGD's, so that a state fits any kind of momentum
and any number of ranks; local Nesterov momentum is m times that, which `reassign` allows for, and a
state does not. Random choices depend on a seed and the step, so that a state goes on bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvd_sparse.memories.error_feedback import ErrorFeedback
from hvd_sparse.memories.global_momentum import GlobalMomentum
from hvd_sparse.memories.momentum_correction import MomentumCorrection
from hvd_sparse.memories.preconditioned import Preconditioned

MOMENTUM_KINDS = ("local", "global")


@dataclass(frozen=True)
class MemoryOptions:
    """The choice of a memory, and of what is done to gradients on their way into it.

    Attributes:
        momentum: m, in [0, 1); 0: plain error feedback.
        nesterov: Whether that momentum is Nesterov's.
        clip_norm: Limit on the norm of the whole gradient that the optimizer sees, of which each
            rank clips its own (engine/clipping.py); None: none.
        momentum_kind: "local": each rank's own, by DGC's momentum correction; "global": that of
            what all ranks applied.
        low_pass: β of ScaleCom's filter, in (0, 1]; 1: none.
        residual_decay: What a residual is multiplied by in each step, in (0, 1].
        preconditioned: Whether entries are compared in units of `SparseAdamW`'s steps.
    """

    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float | None = None
    momentum_kind: str = "local"
    low_pass: float = 1.0
    residual_decay: float = 1.0
    preconditioned: bool = False

    @property
    def momentum_unit(self) -> float:
        """The memory's momentum over that of heavy-ball SGD: DGC's form of Nesterov's keeps m."""
        is_ahead = self.nesterov and self.momentum_kind == "local"
        return self.momentum if is_ahead and self.momentum > 0 else 1.0

    def make(self, numel: int, device: torch.device, world_size: int) -> ErrorFeedback:
        """The memory of one bucket of `numel` elements."""
        m, nesterov, beta, decay = self.momentum, self.nesterov, self.low_pass, self.residual_decay
        if self.preconditioned:
            return Preconditioned(numel, device, beta, decay)
        if m == 0.0:
            return ErrorFeedback(numel, device, beta, decay)
        if self.momentum_kind == "local":
            return MomentumCorrection(numel, device, m, nesterov, low_pass=beta, decay=decay)
        return GlobalMomentum(numel, device, world_size, m, nesterov, low_pass=beta, decay=decay)
