"""What Python and csrc must agree on."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What a gradient may be made of, and its `Dtype` in csrc."""
GRADIENT_DTYPES = tuple(DTYPE_CODES)
MAX_NUMEL = 2**31 - 1
GAP_BLOCK = 128
"""Gaps that share a width in the wire's format (`kGapBlock` in csrc)."""
