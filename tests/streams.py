"""Streams as one can compare them."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.streams import SparseStream


def dense(stream: SparseStream) -> Tensor:
    """The vector that a stream stands for, float64 `(n,)`."""
    out = torch.zeros(stream.numel, dtype=torch.float64)
    out[stream.indices.cpu().long()] = stream.values.cpu().double()
    return out
