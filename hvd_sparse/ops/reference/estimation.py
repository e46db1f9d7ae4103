"""What a threshold is estimated from."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.magnitude import magnitude_keys


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    kth_key = torch.sort(magnitude_keys(x), descending=True).values[k - 1]
    return float(kth_key.view(torch.float32))
