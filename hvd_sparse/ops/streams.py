"""Streams, and their way back to a dense vector.

`indices` and `values` are those of a stream, `(nnz,)` each; so is what comes back as a pair.

Every operation raises TypeError where a tensor has another dtype, and ValueError where lengths do
not match, a tensor is not contiguous or on another device, a number is out of its range, or an
index is found out of `[0, n)`. Some entries may be written by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.ops import _arguments as checks
from hvd_sparse.ops._arguments import GRADIENT_DTYPES, MAX_NUMEL, Entries
from hvd_sparse.ops._dispatch import unchecked


def merge_sum(streams: Sequence[Entries], numel: int) -> Entries:
    """The sum of at least one stream; at one index, values are added in the order of the list.

    `numel` is the length of the vectors that the streams stand for, below 2**31. Returns
    `(indices, values)`, one entry per index that occurs.
    """
    if len(streams) == 0:
        raise ValueError("streams must have at least one stream, got none")
    checks.integer("numel", numel, 0, MAX_NUMEL)
    device = checks.device_of(streams[0][0])
    for i, (indices, values) in enumerate(streams):
        checks.stream(indices, values, device, f"streams[{i}]")
    return unchecked(device).merge_sum(streams, numel)


def difference(indices: Tensor, values: Tensor, other: Tensor) -> Entries:
    """The entries of a stream whose index is not in `other`.

    `other` is int32 `(m,)`, strictly ascending.
    """
    device = checks.device_of(indices)
    checks.stream(indices, values, device)
    checks.tensor("other", other, (torch.int32,), device)
    return unchecked(device).difference(indices, values, other)


def threshold_stream(indices: Tensor, values: Tensor, threshold: float) -> Entries:
    """The entries of a stream that reach a threshold, as `accumulate_select` understands it.

    `threshold` is the least magnitude to keep, >= 0.
    """
    device = checks.device_of(indices)
    checks.stream(indices, values, device)
    checks.threshold(threshold)
    return unchecked(device).threshold_stream(indices, values, threshold)


def scatter_add(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Adds a stream to a vector, float32 `(n,)`, in place: `x[indices] += values`."""
    device = checks.vector("x", x).device
    checks.stream(indices, values, device)
    unchecked(device).scatter_add(x, indices, values)


def decode(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes a stream as a dense vector: zero everywhere but `out[indices] = values`.

    `out` is float32, float16 or bfloat16 `(n,)`; values are rounded to nearest even.
    """
    device = checks.device_of(out)
    checks.tensor("out", out, GRADIENT_DTYPES, device)
    checks.stream(indices, values, device)
    unchecked(device).decode(out, indices, values)


def take_at(x: Tensor, indices: Tensor) -> Tensor:
    """Moves entries out of a vector, float32 `(n,)`: returns `x[indices]`, and leaves zeros there.

    `indices` are int32 `(nnz,)`, each at most once.
    """
    device = checks.vector("x", x).device
    checks.tensor("indices", indices, (torch.int32,), device)
    return unchecked(device).take_at(x, indices)
