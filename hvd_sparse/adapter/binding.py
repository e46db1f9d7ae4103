"""Which optimizer calls, and which parameter a gradient belongs to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.engine import TensorSpec
from hvd_sparse.errors import ConfigError

SPARSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types that are exchanged sparsely; the residual is float32, so float64 would lose precision."""

SEARCHED_FRAMES = 8


def calling_optimizer(compressor: object) -> Any:
    """The Horovod optimizer among the callers whose compression is `compressor`, or None."""
    frame = sys._getframe(1)
    for _ in range(SEARCHED_FRAMES):
        candidate = frame.f_locals.get("self")
        if getattr(candidate, "_compression", None) is compressor:
            return candidate
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def calling_parameter() -> Parameter | None:
    """The parameter whose gradient Horovod hands over or takes back, from its frame, or None."""
    frame = sys._getframe(1)
    for _ in range(SEARCHED_FRAMES):
        if frame.f_code.co_name in ("_allreduce_grad_async", "synchronize"):
            candidate = frame.f_locals.get("p")
            return candidate if isinstance(candidate, Parameter) else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """A parameter or its gradient, as the engine knows it."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype))


class ParameterLookup:
    """Finds the name of the parameter whose gradient a tensor is.

    It tries first what followed the parameter before last time, so that in a steady order each
    look-up is one comparison.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        names = [name for name, _ in self._named]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"named_parameters: names must be unique, got {', '.join(twice)} twice"
            )
        self._parameters = dict(self._named)
        self._names_by_id = {id(p): name for name, p in self._named}
        self._specs: dict[str, tuple[torch.Size, torch.dtype, TensorSpec]] = {}
        self._following: dict[int, int] = {}
        self._last = -1

    def __len__(self) -> int:
        return len(self._named)

    def sparse_specs(self) -> list[TensorSpec]:
        """The parameters of types that can be exchanged sparsely, in the order of their naming."""
        return [spec_of(name, p) for name, p in self._named if p.dtype in SPARSE_DTYPES]

    def spec_of(self, name: str, gradient: Tensor) -> TensorSpec:
        """A gradient as the engine knows it: one object, as long as it looks the same."""
        known = self._specs.get(name)
        if known is None or known[0] != gradient.shape or known[1] is not gradient.dtype:
            known = (gradient.shape, gradient.dtype, spec_of(name, gradient))
            self._specs[name] = known
        return known[2]

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        return iter(self._named)

    def name_of_parameter(self, parameter: Parameter) -> str | None:
        """The parameter's name, or None where it is not a known one."""
        return self._names_by_id.get(id(parameter))

    def requires_grad(self, name: str) -> bool:
        """Whether a parameter that required a gradient in the beginning still does."""
        return self._parameters[name].requires_grad

    def name_of(self, gradient: Tensor) -> str | None:
        """The parameter's name, or None where the tensor is no known parameter's gradient."""
        start = self._following.get(self._last, 0)
        for step in range(len(self._named)):
            place = (start + step) % len(self._named)
            if self._named[place][1].grad is gradient:
                self._following[self._last] = self._last = place
                return self._named[place][0]
        parameter = calling_parameter()  # sparse_as_dense: the tensor is a new one
        return None if parameter is None else self.name_of_parameter(parameter)
