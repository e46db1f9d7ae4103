"""Sums of vectors that the ranks of one host share; tensors on a device are copied there first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.ops import _arguments as checks
from hvd_sparse.ops._arguments import CPU, GRADIENT_DTYPES
from hvd_sparse.ops._dispatch import on_host


def sum_vectors(out: Tensor, vectors: Sequence[Tensor]) -> None:
    """Sums vectors in the order of the list, in float32: `out = ((v0 + v1) + v2) + …`.

    Args:
        out: float32 `(n,)` on the CPU, overwritten.
        vectors: float32, float16 or bfloat16 `(n,)`, at least one; all of one type.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: There is no vector, or a tensor of another length, layout or device.
    """
    checks.tensor("out", out, (torch.float32,), CPU)
    if len(vectors) == 0:
        raise ValueError("vectors must have at least one vector, got none")
    for i, vector in enumerate(vectors):
        checks.tensor(f"vectors[{i}]", vector, GRADIENT_DTYPES, CPU)
        if (vector.numel(), vector.dtype) != (out.numel(), vectors[0].dtype):
            raise ValueError(
                f"vectors[{i}] must have {out.numel()} elements of {vectors[0].dtype}, got "
                f"{vector.numel()} of {vector.dtype}"
            )
    on_host().sum_vectors(out, vectors)
