"""What a threshold is estimated from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.magnitude import magnitude_keys
from hvd_sparse.ops._checks import NON_FINITE_KEY, threshold_key
from hvd_sparse.ops.moments import Moments
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


def accumulator_moments(
    residual: Tensor,
    gradients: Sequence[Tensor],
    threshold: float = 0.0,
    momentum: Momentum | None = None,
) -> Moments:
    """Moments of the finite sums that reach the threshold."""
    accumulated = Accumulated(residual, gradients, momentum)
    keys = accumulated.keys
    x = accumulated.acc[(keys >= threshold_key(threshold)) & (keys < NON_FINITE_KEY)].double()
    magnitude = x.abs()
    return Moments(
        count=x.numel(),
        sum=float(x.sum()),
        sum_of_squares=float((x * x).sum()),
        sum_of_magnitudes=float(magnitude.sum()),
        sum_of_logs=float(magnitude.log().sum()),
        largest=float(magnitude.max()) if x.numel() else 0.0,
    )


def count_at_least(
    residual: Tensor,
    gradients: Sequence[Tensor],
    thresholds: Sequence[float],
    momentum: Momentum | None = None,
) -> list[int]:
    """How many of the sums reach each threshold."""
    keys = Accumulated(residual, gradients, momentum).keys
    return [int((keys >= threshold_key(threshold)).sum()) for threshold in thresholds]
