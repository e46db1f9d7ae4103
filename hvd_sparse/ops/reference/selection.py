"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.magnitude import magnitude_keys
from hvd_sparse.ops._checks import NON_FINITE_KEY, threshold_key
from hvd_sparse.ops.reference.estimation import kth_magnitude


def accumulate_select(
    residual: Tensor, gradients: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Adds, and moves out what reaches the threshold."""
    acc = accumulated(residual, gradients)
    selected = torch.nonzero(magnitude_keys(acc) >= threshold_key(threshold)).view(-1)
    return move_out(residual, acc, selected)


def accumulate_topk(
    residual: Tensor, gradients: Sequence[Tensor], k: int, pivot: float = 0.0
) -> tuple[Tensor, Tensor, float]:
    """Adds, and moves out the k largest magnitudes."""
    del pivot  # it could only save time
    acc = accumulated(residual, gradients)
    threshold = math.inf if k == 0 else kth_magnitude(acc, k) if k <= acc.numel() else 0.0
    # Stable: of equal magnitudes the lower index comes first.
    order = torch.sort(magnitude_keys(acc), descending=True, stable=True).indices[:k]
    selected = order[magnitude_keys(acc)[order] > 0].sort().values
    return *move_out(residual, acc, selected), threshold


def accumulated(residual: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """The residual plus the gradients, as a new tensor `(n,)`."""
    if len(gradients) == 0:
        return residual.clone()
    return residual + torch.cat([gradient.reshape(-1).float() for gradient in gradients])


def move_out(residual: Tensor, acc: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves in `residual` what of `acc` is not `selected`, and returns what is.

    Where `acc` is not finite, the residual stays as it was (0 if that was not finite either).
    """
    values = acc[selected]
    spoiled = magnitude_keys(acc) >= NON_FINITE_KEY
    before = torch.where(magnitude_keys(residual) < NON_FINITE_KEY, residual, 0.0)
    acc[selected] = 0.0
    residual.copy_(torch.where(spoiled, before, acc))
    return selected.to(torch.int32), values
