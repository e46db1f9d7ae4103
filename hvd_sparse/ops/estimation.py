"""What a threshold is estimated from; nothing here changes its arguments.

`residual`, `gradients` and `momentum` stand for the accumulator that `accumulate_select` would make
of them; with no gradients at all, for the residual itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvd_sparse.ops import _checks as checks
from hvd_sparse.ops._dispatch import implementation
from hvd_sparse.ops.momentum import Momentum


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


def sample_accumulator(
    residual: Tensor,
    gradients: Sequence[Tensor],
    start: int,
    stride: int,
    run: int = 1,
    momentum: Momentum | None = None,
) -> Tensor:
    """Magnitudes of the accumulator at regular places.

    Memory is read by the cache line: 16 consecutive elements cost little more than one does.

    Args:
        residual: float32 `(n,)`.
        gradients: As for `accumulate_select`.
        start: First element of the first run, in `[0, stride)`.
        stride: From the start of a run to that of the next, at least 1.
        run: Consecutive elements to take, in `[1, stride]`.
        momentum: As for `accumulate_select`.

    Returns:
        float32 `(m,)`, in the order of the elements; the last run may be cut short by the end.

    Raises:
        TypeError: A tensor has another dtype, or a number is not an int.
        ValueError: As for `accumulate_select`, or a number is out of its range.
    """
    _, device = checks.accumulation(residual, gradients, momentum)
    checks.integer("stride", stride, 1, checks.MAX_NUMEL)
    checks.integer("start", start, 0, stride - 1)
    checks.integer("run", run, 1, stride)
    return implementation(device).sample_accumulator(
        residual, gradients, start, stride, run, momentum
    )
