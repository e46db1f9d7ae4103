"""Momentum correction: another way for gradients to enter the accumulator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Momentum:
    """Momentum correction of an accumulator v, with u the momentum of this rank.

    Source: Lin et al., "Deep Gradient Compression" (ICLR '18): u = m·u + g and
    v = v + u; with Nesterov's momentum u = m·(u + g) and v = (v + u) + g. Where v or u becomes
    non-finite, both keep what they held before (0 if that was not finite either).

    Momentum factor masking is not part of it: `zero_at(buffer, indices)` does that.

    Attributes:
        buffer: u, float32 `(n,)`, changed in place by what accumulates.
        factor: m, in [0, 1); it is rounded to float32.
        nesterov: Which of the two forms.
    """

    buffer: Tensor
    factor: float
    nesterov: bool = False
