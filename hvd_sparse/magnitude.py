"""Magnitudes as integers: one total order for selection everywhere.

`key(x) = bits(x) & 0x7fffffff` orders float32 by |x|, with NaN > inf > finite, and maps both zeros
to 0. A threshold is stored as a float, and compared as a key.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

INFINITE_KEY = 0x7F800000
"""Key of infinity; NaNs lie above it, finite magnitudes below."""


def magnitude_keys(values: Tensor) -> Tensor:
    """Keys of float32 values, int32 of the same shape."""
    return values.view(torch.int32) & 0x7FFFFFFF


def threshold_key(threshold: float) -> int:
    """The least key that passes a threshold; at least 1, so that zeros never pass."""
    bits: int = struct.unpack("<I", struct.pack("<f", threshold))[0]
    return max(1, bits & 0x7FFFFFFF)


def key_magnitude(key: int) -> float:
    """The magnitude whose key is given."""
    magnitude: float = struct.unpack("<f", struct.pack("<I", key))[0]
    return magnitude
