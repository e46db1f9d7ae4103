"""What is accumulated: gradients into a residual, directly or through a momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_sparse.ops import _checks as checks


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


@dataclass(eq=False)
class Kept:
    """A place for what an accumulation was before it: the operation that adds the gradients copies.

    While it is not complete, nothing has changed, even if the operation has failed; once it is,
    going back is possible.

    Attributes:
        residual: float32 `(n,)`, which gets a copy of the residual.
        buffer: float32 `(n,)`, which gets one of the momentum's buffer; None without momentum.
        complete: Whether the copies are made. The operation sets it; the owner takes it back.
    """

    residual: Tensor
    buffer: Tensor | None = None
    complete: bool = field(default=False, init=False)

    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors."""
        return (self.residual,) if self.buffer is None else (self.residual, self.buffer)


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A residual, and the gradients that an operation is to add to it.

    It is checked here, once, and by none of the operations that take it. Each of them adds the
    gradients; `Accumulation(residual)` stands for a residual that has them already.

    Attributes:
        residual: float32 `(n,)`, changed in place.
        gradients: Contiguous float32, float16 or bfloat16 tensors of any shape, laid side by side
            over the residual; none at all if there is nothing to add.
        momentum: Through which the gradients are added (the residual is then v); None: they are
            added as they are. It needs gradients.
        kept: Where a copy goes of what the operation changes, in the same pass; None: there is
            none. It needs gradients.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, or
            the momentum's factor is out of its range.
    """

    residual: Tensor
    gradients: Sequence[Tensor] = ()
    momentum: Momentum | None = None
    kept: Kept | None = None

    def __post_init__(self) -> None:
        checks.vector("residual", self.residual)
        object.__setattr__(self, "gradients", tuple(self.gradients))  # what was checked stays
        checks.gradients(self.gradients, self.numel, self.device)
        if self.momentum is not None:
            self._check_momentum(self.momentum)
        if self.kept is not None:
            self._check_kept(self.kept)

    def keep(self) -> None:
        """Make the copies that are wanted, in a pass of their own; nothing may have changed yet."""
        if self.kept is None:
            return
        self.kept.residual.copy_(self.residual)
        if self.momentum is not None and self.kept.buffer is not None:
            self.kept.buffer.copy_(self.momentum.buffer)
        self.kept.complete = True

    @property
    def numel(self) -> int:
        """Elements of the residual, n."""
        return self.residual.numel()

    @property
    def device(self) -> torch.device:
        """Where all of its tensors are."""
        return self.residual.device

    def _check_momentum(self, momentum: Momentum) -> None:
        if not isinstance(momentum, Momentum):
            raise TypeError(f"momentum must be a Momentum or None, got {type(momentum).__name__}")
        self._check_beside("momentum.buffer", momentum.buffer)
        if not 0.0 <= momentum.factor < 1.0:
            raise ValueError(f"momentum.factor must be in [0, 1), got {momentum.factor}")
        if len(self.gradients) == 0 and self.numel > 0:
            raise ValueError("gradients must not be empty where there is momentum")

    def _check_kept(self, kept: Kept) -> None:
        if not isinstance(kept, Kept):
            raise TypeError(f"kept must be a Kept or None, got {type(kept).__name__}")
        self._check_beside("kept.residual", kept.residual)
        if self.momentum is not None:
            self._check_beside("kept.buffer", kept.buffer)
        elif kept.buffer is not None:
            raise ValueError("kept.buffer must be None where there is no momentum")
        if len(self.gradients) == 0 and self.numel > 0:
            raise ValueError("gradients must not be empty where something is kept")

    def _check_beside(self, name: str, value: object) -> None:
        """Checks that a tensor has an element for each of the residual's."""
        checked = checks.tensor(name, value, (torch.float32,), self.device)
        if checked.numel() != self.numel:
            raise ValueError(
                f"{name} must have residual's numel {self.numel}, got {checked.numel()}"
            )
