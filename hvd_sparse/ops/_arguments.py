"""What the operations ask of their arguments, checked once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Entries = tuple[Tensor, Tensor]
"""Indices and values of a stream."""

CPU = torch.device("cpu")

# What Python and csrc must agree on:
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What a gradient may be made of, and its `Dtype` in csrc."""
GRADIENT_DTYPES = tuple(DTYPE_CODES)
MAX_NUMEL, MAX_SEED = 2**31 - 1, 2**64 - 1
GAP_BLOCK = 128
"""Gaps that share a width in the wire's format (`kGapBlock` in csrc/cpu/wire.h)."""


def tensor(name: str, value: object, dtypes: Sequence[torch.dtype], device: torch.device) -> Tensor:
    """Returns `value` if it is a contiguous 1-D tensor of one of `dtypes` on `device`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}, got {_names([value.dtype])}")
    if value.dim() != 1:
        raise ValueError(f"{name} must have shape (n,), got {tuple(value.shape)}")
    return _laid_out(name, value, device)


def vector(name: str, value: object) -> Tensor:
    """Returns `value` if it is a contiguous float32 tensor `(n,)`, n < 2**31."""
    checked = tensor(name, value, (torch.float32,), device_of(value))
    if checked.numel() > MAX_NUMEL:
        raise ValueError(f"{name} must have fewer than 2**31 elements, got {checked.numel()}")
    return checked


def device_of(value: object) -> torch.device:
    """The device of what should be a tensor; a later check says if it is none."""
    return value.device if isinstance(value, Tensor) else CPU


def gradients(values: Sequence[Tensor], numel: int, device: torch.device) -> None:
    """Checks tensors of any shape that lie side by side over `numel` elements."""
    total = 0
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise TypeError(f"gradients[{i}] must be a tensor, got {type(value).__name__}")
        if value.dtype not in GRADIENT_DTYPES:
            raise TypeError(
                f"gradients[{i}] must be {_names(GRADIENT_DTYPES)}, got {_names([value.dtype])}"
            )
        if value.device != device or not value.is_contiguous():
            _laid_out(f"gradients[{i}]", value, device)
        total += value.numel()
    if len(values) > 0 and total != numel:
        raise ValueError(f"gradients must add up to residual's numel {numel}, got {total}")


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Returns `value` if it is an integer in `[low, high]`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        expected = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return value


def threshold(value: float) -> None:
    """Checks a threshold; NaN is one that only non-finite values pass."""
    if value < 0:
        raise ValueError(f"threshold must be >= 0, got {value}")


def bad_index(what: str, numel: int) -> ValueError:
    """The error for indices that leave the vector or are out of order."""
    return ValueError(f"{what} must be strictly ascending in [0, {numel})")


def _laid_out(name: str, value: Tensor, device: torch.device) -> Tensor:
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    return value


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
