"""Gradients that Horovod reduces itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hvd_sparse.engine import Engine, Method
from hvd_sparse.errors import ConfigError
from hvd_sparse.methods import METHODS


@dataclass(frozen=True)
class Dense:
    """Context of a gradient that Horovod reduces itself.

    Attributes:
        dtype: Type in which it is to be given back.
        flushed: The parameter's name, where its residual was added to the gradient.
    """

    dtype: torch.dtype
    flushed: str | None = None


@cache
def dense_of(dtype: torch.dtype) -> Dense:
    """The context of gradients of a type; one object, since every step asks for it often."""
    return Dense(dtype)


def with_leftover(
    name: str, tensor: Tensor, leftover: Tensor, engine: Engine
) -> tuple[Tensor, Dense]:
    """A dense gradient, and with it some of what was not sent while it was exchanged sparsely.

    Args:
        name: The parameter's.
        tensor: Its gradient.
        leftover: What was not sent.
        engine: Says how much of that goes out in this step.

    Returns:
        What Horovod is to reduce, and what is to be known when it has.

    Raises:
        ConfigError: What was not sent has another shape.
    """
    if leftover.shape != tensor.shape:
        raise ConfigError(
            f"residual of {name!r}: shape must be {tuple(tensor.shape)}, "
            f"got {tuple(leftover.shape)}"
        )
    released = engine.residuals.release(name, tensor)
    assert released is not None
    together = released.to(tensor.device) + tensor  # float32, or 64
    if tensor.dtype == torch.float16:  # what a rank with nothing left hands to Horovod, too
        together = together.to(torch.float16)
    return as_horovod_takes_it(together), Dense(tensor.dtype, name)


def as_horovod_takes_it(tensor: Tensor) -> Tensor:
    """A dense gradient in a form that Horovod's allreduce accepts: contiguous, and not bfloat16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous()


def clipped_dense_method(clip_norm: float) -> Method:
    """How tensors are reduced that would be Horovod's, but must be clipped first."""
    return METHODS["topk"](density=1.0, clip_norm=clip_norm).make()
