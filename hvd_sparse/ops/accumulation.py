"""What is accumulated: gradients into a residual, directly or through a momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hvd_sparse.ops import _arguments as checks


@dataclass(frozen=True)
class Momentum:
    """Momentum correction of an accumulator v, with u the momentum of this rank.

    Source: Lin et al., "Deep Gradient Compression" (ICLR '18): u = m·u + g and
    v = v + u; with Nesterov's momentum u = m·(u + g) and v = (v + u) + g. Where v or u becomes
    non-finite, both keep what they held before (0 if that was not finite either).

    Momentum factor masking is not part of it: `take_at(buffer, indices)` does that. The buffer, u,
    is float32 `(n,)`, changed in place by what accumulates; the factor, m, is in [0, 1).
    """

    buffer: Tensor
    factor: float
    nesterov: bool = False


@dataclass(frozen=True, eq=False)
class Before:
    """What an accumulation was before it: the operation that adds the gradients only reads it.

    What the accumulation's own tensors hold then does not matter. So going back takes no copy, and
    is possible wherever the operation has failed. Both are float32 `(n,)`, and `buffer` is the
    momentum's, if there is one.
    """

    residual: Tensor
    buffer: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A residual, and the gradients that an operation is to add to it.

    It is checked here, once, and by none of the operations that take it. Each of them adds the
    gradients; `Accumulation(residual)` stands for a residual that has them already.

    Attributes:
        residual: float32 `(n,)`, which gets what the operation leaves.
        gradients: Contiguous float32, float16 or bfloat16 tensors of any shape, laid side by side
            over the residual; none at all if there is nothing to add.
        momentum: Through which the gradients are added (the residual is then v); None: they are
            added as they are. It needs gradients.
        before: What there was before, in tensors that share no memory with the residual and the
            momentum's buffer; None: it is in those, which are changed in place. It needs gradients.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, what
            was before is where the result goes, or the momentum's factor is out of its range.
    """

    residual: Tensor
    gradients: Sequence[Tensor] = ()
    momentum: Momentum | None = None
    before: Before | None = None

    def __post_init__(self) -> None:
        checks.vector("residual", self.residual)
        object.__setattr__(self, "gradients", tuple(self.gradients))  # what was checked stays
        checks.gradients(self.gradients, self.numel, self.device)
        if self.momentum is not None:
            self._check_momentum(self.momentum)
        if self.before is not None:
            self._check_before(self.before)

    def in_place(self) -> Accumulation:
        """The same, for what only works in place: what was before is copied, in its own pass."""
        if self.before is None:
            return self
        self.residual.copy_(self.before.residual)
        if self.momentum is not None and self.before.buffer is not None:
            self.momentum.buffer.copy_(self.before.buffer)
        return replace(self, before=None)

    def unchanged(self) -> Accumulation:
        """The same sums, for what only reads: its tensors are those of before."""
        before, momentum = self.before, self.momentum
        if before is None:
            return self
        if momentum is not None and before.buffer is not None:
            momentum = replace(momentum, buffer=before.buffer)
        return Accumulation(before.residual, self.gradients, momentum)

    @property
    def numel(self) -> int:
        return self.residual.numel()

    @property
    def device(self) -> torch.device:
        return self.residual.device

    def _check_momentum(self, momentum: Momentum) -> None:
        if not isinstance(momentum, Momentum):
            raise TypeError(f"momentum must be a Momentum or None, got {type(momentum).__name__}")
        self._check_beside("momentum.buffer", momentum.buffer)
        if not 0.0 <= momentum.factor < 1.0:
            raise ValueError(f"momentum.factor must be in [0, 1), got {momentum.factor}")
        if len(self.gradients) == 0 and self.numel > 0:
            raise ValueError("gradients must not be empty where there is momentum")

    def _check_before(self, before: Before) -> None:
        if not isinstance(before, Before):
            raise TypeError(f"before must be a Before or None, got {type(before).__name__}")
        self._check_beside("before.residual", before.residual)
        self._check_apart("before.residual", before.residual, self.residual)
        if self.momentum is not None:
            self._check_beside("before.buffer", before.buffer)
            assert before.buffer is not None
            self._check_apart("before.buffer", before.buffer, self.momentum.buffer)
        elif before.buffer is not None:
            raise ValueError("before.buffer must be None where there is no momentum")
        if len(self.gradients) == 0 and self.numel > 0:
            raise ValueError("gradients must not be empty where there is a before")

    def _check_apart(self, name: str, before: Tensor, after: Tensor) -> None:
        if self.numel > 0 and before.data_ptr() == after.data_ptr():
            raise ValueError(f"{name} must not be the tensor that is written, got the same")

    def _check_beside(self, name: str, value: object) -> None:
        """Checks that a tensor has an element for each of the residual's."""
        checked = checks.tensor(name, value, (torch.float32,), self.device)
        if checked.numel() != self.numel:
            raise ValueError(
                f"{name} must have residual's numel {self.numel}, got {checked.numel()}"
            )
