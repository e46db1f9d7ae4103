"""What a threshold is estimated from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.magnitude import magnitude_keys
from hvd_sparse.ops.momentum import Momentum
from hvd_sparse.ops.reference._accumulated import Accumulated


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    kth_key = torch.sort(magnitude_keys(x), descending=True).values[k - 1]
    return float(kth_key.view(torch.float32))


def sample_accumulator(
    residual: Tensor,
    gradients: Sequence[Tensor],
    start: int,
    stride: int,
    run: int = 1,
    momentum: Momentum | None = None,
) -> Tensor:
    """Magnitudes of some of the sums."""
    keys = Accumulated(residual, gradients, momentum).keys
    runs = torch.arange(start, max(start, keys.numel()), stride, device=keys.device)
    sampled = (runs.view(-1, 1) + torch.arange(run, device=keys.device)).flatten()
    return keys[sampled[sampled < keys.numel()]].view(torch.float32)
