"""The operations in plain torch: what they mean, and what runs where there is no native library.

Works on any device. The arguments are as `hvd_sparse.ops` has checked them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.ops._checks import NON_FINITE_KEY, bad_index, threshold_key


def keys(x: Tensor) -> Tensor:
    """Magnitudes of float32 `x` as integers in the same order: NaN > inf > finite > 0 == -0."""
    return x.view(torch.int32) & 0x7FFFFFFF


def accumulate_select(
    residual: Tensor, gradients: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Adds, and moves out what reaches the threshold."""
    acc = _sum(residual, gradients)
    selected = torch.nonzero(keys(acc) >= threshold_key(threshold)).view(-1)
    return _move_out(residual, acc, selected)


def accumulate_topk(
    residual: Tensor, gradients: Sequence[Tensor], k: int, pivot: float = 0.0
) -> tuple[Tensor, Tensor, float]:
    """Adds, and moves out the k largest magnitudes."""
    del pivot  # it could only save time
    acc = _sum(residual, gradients)
    threshold = math.inf if k == 0 else kth_magnitude(acc, k) if k <= acc.numel() else 0.0
    # Stable: of equal magnitudes the lower index comes first.
    order = torch.sort(keys(acc), descending=True, stable=True).indices[:k]
    selected = order[keys(acc)[order] > 0].sort().values
    return *_move_out(residual, acc, selected), threshold


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    kth_key = torch.sort(keys(x), descending=True).values[k - 1]
    return float(kth_key.view(torch.float32))


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


def threshold_stream(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The entries that reach the threshold."""
    kept = keys(values) >= threshold_key(threshold)
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


def _sum(residual: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """The residual plus the gradients, as a new tensor `(n,)`."""
    if len(gradients) == 0:
        return residual.clone()
    return residual + torch.cat([gradient.reshape(-1).float() for gradient in gradients])


def _move_out(residual: Tensor, acc: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves in `residual` what of `acc` is not `selected`, and returns what is.

    Where `acc` is not finite, the residual stays as it was (0 if that was not finite either).
    """
    values = acc[selected]
    spoiled = keys(acc) >= NON_FINITE_KEY
    before = torch.where(keys(residual) < NON_FINITE_KEY, residual, 0.0)
    acc[selected] = 0.0
    residual.copy_(torch.where(spoiled, before, acc))
    return selected.to(torch.int32), values


def _check_range(what: str, indices: Tensor, numel: int) -> None:
    if indices.numel() == 0:
        return
    low, high = torch.aminmax(indices)
    if int(low) < 0 or int(high) >= numel:
        raise bad_index(what, numel)
