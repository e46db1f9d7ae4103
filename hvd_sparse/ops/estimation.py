"""What a threshold is estimated from."""

from __future__ import annotations

from torch import Tensor

from hvd_sparse.ops import _checks as checks
from hvd_sparse.ops._dispatch import implementation


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude.

    Args:
        x: float32 `(n,)`.
        k: Rank in `[1, n]`.

    Raises:
        TypeError: `x` has another dtype, or `k` is not an int.
        ValueError: `x` is not contiguous, or `k` is out of its range.
    """
    device = checks.vector("x", x).device
    checks.integer("k", k, 1, x.numel())
    return implementation(device).kth_magnitude(x, k)
