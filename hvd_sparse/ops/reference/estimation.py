"""What a threshold is estimated from."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.magnitude import magnitude_keys
from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.reference._sums import Sums


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    kth_key = torch.sort(magnitude_keys(x), descending=True).values[k - 1]
    return float(kth_key.view(torch.float32))


def sample_accumulator(accumulation: Accumulation, start: int, stride: int, run: int = 1) -> Tensor:
    """Magnitudes of some of the sums."""
    keys = Sums(accumulation).keys
    runs = torch.arange(start, max(start, keys.numel()), stride, device=keys.device)
    sampled = (runs.view(-1, 1) + torch.arange(run, device=keys.device)).flatten()
    return keys[sampled[sampled < keys.numel()]].view(torch.float32)
