"""Element-wise operations that a reduction may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operation:
    """An associative operation with a neutral element, which absent entries stand for.

    Attributes:
        name: What it is called; the same on all ranks.
        combine: Combines two tensors of one shape and type, element by element.
        neutral: The neutral element for a type: `combine(x, neutral) == x`.
    """

    name: str
    combine: Callable[[Tensor, Tensor], Tensor]
    neutral: Callable[[torch.dtype], float]


def _zero(dtype: torch.dtype) -> float:
    return 0


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


SUM = Operation("sum", torch.add, _zero)
MAX = Operation("max", torch.maximum, _lowest)
MIN = Operation("min", torch.minimum, _highest)
OPERATIONS = {operation.name: operation for operation in (SUM, MAX, MIN)}
"""Operations by the names under which a user asks for them."""
