"""Accumulation and selection: gradients are added, and what is selected moves out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvd_sparse.ops import _checks as checks
from hvd_sparse.ops._dispatch import implementation


def accumulate_select(
    residual: Tensor, gradients: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Adds gradients to the residual and moves out what reaches a threshold, in one pass.

    An entry that becomes non-finite is moved out too, while the residual keeps what it held before
    (0 if that was not finite either): the residual is finite afterwards.

    Args:
        residual: float32 `(n,)`, changed in place: the sum, and zero where an entry moved out.
        gradients: Contiguous float32, float16 or bfloat16 tensors of any shape, laid side by side
            over the residual; none at all if there is nothing to add.
        threshold: Least magnitude to move out, >= 0. Zeros stay at any threshold, non-finite
            values at none (NaN stands for infinity here).

    Returns:
        `(indices, values)`, a stream `(nnz,)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, or
            the threshold is negative.
    """
    device = checks.vector("residual", residual).device
    checks.gradients(gradients, residual.numel(), device)
    checks.threshold_key(threshold)
    return implementation(device).accumulate_select(residual, gradients, threshold)


def accumulate_topk(
    residual: Tensor, gradients: Sequence[Tensor], k: int, pivot: float = 0.0
) -> tuple[Tensor, Tensor, float]:
    """Adds gradients to the residual and moves out the k largest magnitudes, exactly.

    Takes the time of one pass where `pivot` lies somewhat below the k-th magnitude, so that it lets
    a little more than k entries pass: 0.9 times the last step's threshold, say.

    Args:
        residual: As for `accumulate_select`; entries that become non-finite are the largest.
        gradients: As for `accumulate_select`.
        k: How many entries to move out, >= 0; fewer move if fewer are nonzero. Of equal magnitudes
            the lower indices move.
        pivot: A guess at a magnitude somewhat below the k-th. 0.0 is no guess; a bad one costs
            time and changes nothing.

    Returns:
        `(indices, values, threshold)`: a stream, and the k-th largest magnitude (0.0 with fewer
        than k nonzeros, inf for k = 0).

    Raises:
        TypeError: A tensor has another dtype, or `k` is not an int.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, or
            `k` is negative.
    """
    device = checks.vector("residual", residual).device
    checks.gradients(gradients, residual.numel(), device)
    checks.integer("k", k, 0)
    return implementation(device).accumulate_topk(residual, gradients, k, pivot)
