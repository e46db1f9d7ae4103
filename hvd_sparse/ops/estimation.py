"""What a threshold is estimated from; nothing here changes its arguments.

Every operation raises TypeError for a tensor or a number of another type, and ValueError where `x`
is not contiguous or a number is out of its range.
"""

from __future__ import annotations

from torch import Tensor

from hvd_sparse.ops import _arguments as checks
from hvd_sparse.ops._arguments import MAX_NUMEL
from hvd_sparse.ops._dispatch import unchecked
from hvd_sparse.ops.accumulation import Accumulation


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude.

    Args:
        x: float32 `(n,)`.
        k: Rank in `[1, n]`.
    """
    device = checks.vector("x", x).device
    checks.integer("k", k, 1, x.numel())
    return unchecked(device).kth_magnitude(x, k)


def sample_accumulator(accumulation: Accumulation, start: int, stride: int, run: int = 1) -> Tensor:
    """Magnitudes at regular places of what `accumulate_select` would make of the residual.

    Memory is read by the cache line: 16 consecutive elements cost little more than one does.

    Args:
        accumulation: What would be accumulated; it stays as it is.
        start: First element of the first run, in `[0, stride)`.
        stride: From the start of a run to that of the next, at least 1.
        run: Consecutive elements to take, in `[1, stride]`.

    Returns:
        float32 `(m,)`, in the order of the elements; the last run may be cut short by the end.
    """
    checks.integer("stride", stride, 1, MAX_NUMEL)
    checks.integer("start", start, 0, stride - 1)
    checks.integer("run", run, 1, stride)
    return unchecked(accumulation.device).sample_accumulator(accumulation, start, stride, run)
