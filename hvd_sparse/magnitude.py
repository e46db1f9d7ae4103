"""Magnitudes as integers: one total order for selection everywhere.

`key(x) = bits(x) & 0x7fffffff` orders float32 by |x|, with NaN > inf > finite, and maps both zeros
to 0. A threshold is stored as a float, and compared as a key.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

INFINITE_KEY = 0x7F800000
"""Key of infinity; NaNs lie above it, finite magnitudes below."""
NAN_KEY = 0x7FC00000
"""Key of the usual NaN."""


def magnitude_keys(values: Tensor) -> Tensor:
    """Keys of float32 values, int32 of the same shape."""
    return values.view(torch.int32) & 0x7FFFFFFF


def magnitude_key(magnitude: float) -> int:
    """Key of a float32 number; what is too large for float32 is infinite."""
    if math.isnan(magnitude):
        return NAN_KEY
    try:
        bits: int = struct.unpack("<I", struct.pack("<f", abs(magnitude)))[0]
    except OverflowError:
        return INFINITE_KEY
    return bits


def threshold_key(threshold: float) -> int:
    """The least key that passes a threshold: never 0, and never above a non-finite value's."""
    return min(max(1, magnitude_key(threshold)), INFINITE_KEY)


def key_magnitude(key: int) -> float:
    """The magnitude whose key is given."""
    magnitude: float = struct.unpack("<f", struct.pack("<I", key))[0]
    return magnitude
