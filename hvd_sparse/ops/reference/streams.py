"""Streams, and their way back to a dense vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.magnitude import magnitude_keys, threshold_key
from hvd_sparse.ops._checks import bad_index


def merge_sum(streams: Sequence[tuple[Tensor, Tensor]], numel: int) -> tuple[Tensor, Tensor]:
    """The sum of streams, in the order of the list."""
    for i, (indices, _) in enumerate(streams):
        _check_range(f"streams[{i}] indices", indices, numel)
    union = torch.unique(torch.cat([indices for indices, _ in streams]))
    # -0.0 is the neutral element of a float sum: 0.0 + -0.0 would lose a sign.
    total = torch.full(union.shape, -0.0, device=union.device)
    for indices, values in streams:
        total[torch.searchsorted(union, indices)] += values
    return union, total


def difference(indices: Tensor, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The entries whose index is not in `other`."""
    kept = ~torch.isin(indices, other)
    return indices[kept], values[kept]


def unapplied(
    sent: tuple[Tensor, Tensor], lost: tuple[Tensor, Tensor], applied: Tensor
) -> tuple[Tensor, Tensor]:
    """What an exchange leaves with its sender."""
    kept = torch.isin(lost[0], applied)
    parts = [difference(*sent, applied), (lost[0][kept], lost[1][kept])]
    indices, order = torch.cat([indices for indices, _ in parts]).sort()
    return indices, torch.cat([values for _, values in parts])[order]


def threshold_stream(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The entries that reach the threshold."""
    kept = magnitude_keys(values) >= threshold_key(threshold)
    return indices[kept], values[kept]


def scatter_add(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Adds a stream to a vector."""
    _check_range("indices", indices, x.numel())
    x[indices] += values


def decode(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes a stream as a dense vector."""
    _check_range("indices", indices, out.numel())
    out.zero_()
    out[indices] = values.to(out.dtype)


def take_at(x: Tensor, indices: Tensor) -> Tensor:
    """Moves entries out of a vector."""
    _check_range("indices", indices, x.numel())
    values = x[indices]
    x[indices] = 0.0
    return values


def zero_at(x: Tensor, indices: Tensor) -> None:
    """Zeroes entries of a vector."""
    _check_range("indices", indices, x.numel())
    x[indices] = 0.0


def _check_range(what: str, indices: Tensor, numel: int) -> None:
    if indices.numel() == 0:
        return
    low, high = torch.aminmax(indices)
    if int(low) < 0 or int(high) >= numel:
        raise bad_index(what, numel)
