"""The sparse vectors that users bring, as parts and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from hvd_sparse.errors import UnsupportedError
from hvd_sparse.streams import Operation, Part, SparseStream

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
MAX_NUMEL = 2**31 - 1

SparseVector: TypeAlias = SparseStream | Tensor
"""A stream, or a torch tensor of layout `torch.sparse_coo`."""


class Form(ABC):
    """What kind of vector a user brought, and how to make another one of it.

    Attributes:
        numel: N, indices that there may be.
        dtype: The values' type.
        block: Shape of what one index stands for.
    """

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]

    @abstractmethod
    def restore(self, part: Part, operation: Operation) -> SparseVector:
        """A whole vector in the user's form."""

    def __str__(self) -> str:
        return f"{self.dtype} of {self.numel} elements of shape {self.block}"


@dataclass(frozen=True)
class StreamForm(Form):
    """A `SparseStream`."""

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]

    def restore(self, part: Part, operation: Operation) -> SparseStream:
        """See `Form.restore`."""
        sparse = part.to_sparse(operation)
        assert sparse.indices is not None
        return SparseStream(sparse.indices, sparse.values, self.numel)


@dataclass(frozen=True)
class TensorForm(Form):
    """A torch tensor with `sparse_dim` sparse dimensions, and dense ones after them."""

    numel: int
    dtype: torch.dtype
    block: tuple[int, ...]
    shape: tuple[int, ...]
    sparse_dim: int
    device: torch.device

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}, {self.sparse_dim} dimensions of it sparse"

    def restore(self, part: Part, operation: Operation) -> Tensor:
        """See `Form.restore`; coalesced, on the user's device."""
        sparse = part.to_sparse(operation)
        assert sparse.indices is not None
        rows = torch.unravel_index(sparse.indices.long(), self.shape[: self.sparse_dim])
        return torch.sparse_coo_tensor(
            torch.stack(rows),
            sparse.values,
            self.shape,
            device=self.device,
            check_invariants=False,
            is_coalesced=True,
        )


def read_vector(x: object) -> tuple[Part, Form]:
    """A user's vector as a part, on the CPU.

    Raises:
        TypeError: It is no stream or sparse COO tensor.
        ValueError: A stream's indices do not ascend, or are out of range.
        UnsupportedError: Its values have another type than 32 or 64 bits, it is too long, or no
            dimension of it is sparse.
    """
    if isinstance(x, SparseStream):
        form: Form = StreamForm(x.numel, x.values.dtype, tuple(x.values.shape[1:]))
        part = Part(_checked_indices(x), x.values.cpu().contiguous(), 0, x.numel)
    elif isinstance(x, Tensor) and x.layout == torch.sparse_coo:
        x = x.detach().coalesce()
        shape = tuple(x.shape)
        if x.sparse_dim() == 0:
            raise UnsupportedError(f"x must have a sparse dimension, got none in shape {shape}")
        sizes = shape[: x.sparse_dim()]
        numel = prod(sizes)
        form = TensorForm(numel, x.dtype, shape[x.sparse_dim() :], shape, x.sparse_dim(), x.device)
        strides = torch.tensor([prod(sizes[i + 1 :]) for i in range(len(sizes))])
        flat = (x.indices().cpu() * strides[:, None]).sum(0)
        part = Part(flat.to(torch.int32), x.values().cpu().contiguous(), 0, numel)
    else:
        given = x.layout if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a SparseStream or a sparse COO tensor, got {given}")
    if form.dtype not in DTYPES:
        raise UnsupportedError(f"values must be of one of {DTYPES}, got {form.dtype}")
    if form.numel > MAX_NUMEL or 0 in form.block:
        raise UnsupportedError(f"x must have fewer than 2**31 non-empty elements, got {form}")
    return part, form


def _checked_indices(stream: SparseStream) -> Tensor:
    """A stream's indices, as they have to be."""
    indices = stream.indices.cpu().contiguous()
    if indices.dtype != torch.int32 or indices.dim() != 1 or stream.values.dim() == 0:
        raise TypeError(f"x.indices must be int32 (nnz,), got {indices.dtype} {indices.shape}")
    if len(indices) != len(stream.values):
        raise ValueError(f"x must have {len(indices)} values, got {len(stream.values)}")
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= stream.numel):
        raise ValueError(f"x.indices must be in [0, {stream.numel})")
    if bool((indices[1:] <= indices[:-1]).any()):
        raise ValueError("x.indices must be strictly ascending")
    return indices
