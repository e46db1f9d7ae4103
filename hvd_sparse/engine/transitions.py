"""Residuals whose tensors have left the buckets, for good or for a while.

A tensor that has become dense gives its residual away over several steps. All of it at once would
be many gradients in one: at density 0.001 a residual is some ten times as long as a gradient. A
frozen tensor, one that no longer requires a gradient, keeps residual and momentum out of the
exchange, since they would go on moving its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor

from hvd_sparse.engine.bucket import Location
from hvd_sparse.engine.bucketing import Assignment, TensorSpec

RELEASED_SHARE = 0.5
"""Norm of what is released in a step, at most, in units of the norm of this rank's gradient."""


class Release:
    """Gives the residuals of dense tensors away, step by step."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._flushed: set[str] = set()

    @property
    def is_due(self) -> bool:
        """Whether a part was reduced, and nobody has said yet whether its step counts."""
        return bool(self._flushed)

    @property
    def names(self) -> set[str]:
        """Tensors of which a part was reduced."""
        return self._flushed

    def part(self, name: str, residual: Tensor, gradient: Tensor) -> Tensor:
        """What of a residual goes with a dense gradient of this rank.

        Where that is float16, it is what their sum, rounded, has more than the gradient; the rest
        waits on.

        Args:
            name: The tensor's.
            residual: What waits, float32.
            gradient: In the residual's shape.
        """
        norm, limit = norm_of(residual), RELEASED_SHARE * norm_of(gradient)
        if not limit < norm:
            limit = norm  # all of it; also where the gradient is NaN, and the step will not count
        part = residual if limit == norm else residual * (limit / norm)
        if gradient.dtype == torch.float16:
            own = gradient.contiguous().to(part)
            together = (own + part).half()
            part = torch.where(together.isfinite(), together - own, 0.0)
        self._parts[name] = part
        return part

    def flushed(self, name: str) -> None:
        """The last part was reduced; it is let go of where the step counts."""
        self._flushed.add(name)

    def settle(
        self, residuals: dict[str, Tensor], counts: bool, undone: Collection[str] = ()
    ) -> None:
        """Take what was released out of the residuals, if its step counts."""
        flushed = self._flushed.difference(undone) & self._parts.keys() & residuals.keys()
        for name in flushed if counts else ():
            part = self._parts[name]
            if part is residuals[name]:
                del residuals[name]
                continue
            residuals[name] = torch.sub(residuals[name], part, out=part)
            if not residuals[name].any():
                del residuals[name]
        self._flushed.clear()
        self._parts.clear()


class Frozen:
    """What frozen tensors of buckets hold: residuals and momenta by name, then by kind."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Tensor]] = {}

    def freeze(self, name: str, location: Location) -> None:
        """Take what a bucket holds of a tensor out of it; its step must not have begun."""
        if name not in self.held:
            self.held[name] = location.cut()

    def thaw(self, name: str, location: Location) -> None:
        """Put it back."""
        parts = self.held.pop(name, None)
        if parts is not None:
            location.put_in(parts)

    def rescale(self, factor: float) -> None:
        """Multiply all of it by a factor."""
        for parts in self.held.values():
            for part in parts.values():
                part.mul_(factor)

    def add_to(self, memories: dict[str, dict[str, Tensor]]) -> None:
        """Add it to tensors by kind and by name."""
        for name, parts in self.held.items():
            for kind, part in parts.items():
                memories[kind][name] = memories[kind][name] + part


def momentum_unit(assignment: Assignment, spec: TensorSpec) -> float:
    """What an assignment's momentum of a tensor is multiplied by; see `MemoryOptions`."""
    method = assignment.choice_of(spec).method
    return 1.0 if method is None else method.memory.momentum_unit


def norm_of(*tensors: Tensor) -> float:
    """L2 norm of tensors of one device together.

    A tensor's squares are added in float64, which takes 15 times as long, only if need be.
    """
    norm = _norm_in(torch.float32, tensors)
    return norm if isfinite(norm) else _norm_in(torch.float64, tensors)


def _norm_in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> float:
    """The same in sums of a type, or of the tensor's own where that is wider."""
    types = (torch.promote_types(dtype, tensor.dtype) for tensor in tensors)
    norms = [torch.linalg.vector_norm(t, dtype=d) for t, d in zip(tensors, types, strict=True)]
    return float(torch.stack([norm.double() for norm in norms]).square().sum().sqrt())


def l1_of(tensors: Iterable[Tensor]) -> float:
    """L1 norm of tensors together."""
    return sum(float(tensor.double().abs().sum()) for tensor in tensors)
