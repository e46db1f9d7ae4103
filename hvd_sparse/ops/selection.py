"""Accumulation and selection: gradients are added, and what is selected moves out.

One pass over the vectors each. All of them take `residual`, `gradients` and `momentum` alike, which
`accumulate_select` describes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hvd_sparse.ops import _checks as checks
from hvd_sparse.ops._dispatch import implementation
from hvd_sparse.ops.momentum import Momentum

_UINT64_MAX = 2**64 - 1


def accumulate_select(
    residual: Tensor,
    gradients: Sequence[Tensor],
    threshold: float,
    momentum: Momentum | None = None,
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
        momentum: Through which the gradients are added (the residual is then v), or None. It needs
            gradients.

    Returns:
        `(indices, values)`, a stream `(nnz,)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, or
            the threshold or the momentum's factor is out of its range.
    """
    _, device = checks.accumulation(residual, gradients, momentum)
    checks.threshold(threshold)
    return implementation(device).accumulate_select(residual, gradients, threshold, momentum)


def accumulate_topk(
    residual: Tensor,
    gradients: Sequence[Tensor],
    k: int,
    pivot: float = 0.0,
    momentum: Momentum | None = None,
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
        momentum: As for `accumulate_select`.

    Returns:
        `(indices, values, threshold)`: a stream, and the k-th largest magnitude (0.0 with fewer
        than k nonzeros, inf for k = 0).

    Raises:
        TypeError: A tensor has another dtype, or `k` is not an int.
        ValueError: As for `accumulate_select`, or `k` is negative.
    """
    _, device = checks.accumulation(residual, gradients, momentum)
    checks.integer("k", k, 0)
    return implementation(device).accumulate_topk(residual, gradients, k, pivot, momentum)


def accumulate_group_topk(
    residual: Tensor,
    gradients: Sequence[Tensor],
    k: int,
    group_numel: int = 512,
    momentum: Momentum | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds gradients and moves out the k largest magnitudes of every group of consecutive elements.

    Source: Renggli et al., "SparCML" (SC '19), section 8: k out of every 512 elements.

    Args:
        residual: As for `accumulate_topk`.
        gradients: As for `accumulate_select`.
        k: How many entries of each group move, in [1, group_numel]; fewer where fewer are nonzero.
            Of equal magnitudes the lower indices move.
        group_numel: Elements in a group, at least 1; the last group may be shorter.
        momentum: As for `accumulate_select`.

    Returns:
        `(indices, values)`, a stream.

    Raises:
        TypeError: A tensor has another dtype, or a number is not an int.
        ValueError: As for `accumulate_select`, or a number is out of its range.
    """
    _, device = checks.accumulation(residual, gradients, momentum)
    checks.integer("group_numel", group_numel, 1, checks.MAX_NUMEL)
    checks.integer("k", k, 1, group_numel)
    return implementation(device).accumulate_group_topk(
        residual, gradients, k, group_numel, momentum
    )


def partition_select(
    residual: Tensor,
    gradients: Sequence[Tensor],
    threshold: float,
    start: int,
    stop: int,
    momentum: Momentum | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds gradients everywhere, and moves out what reaches a threshold within a partition.

    Source: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
    Distributed Deep Learning" (ExDyna), Algorithm 4.

    Args:
        residual: As for `accumulate_select`. Entries that become non-finite move out wherever they
            are: a rank must not keep them to itself.
        gradients: As for `accumulate_select`.
        threshold: As for `accumulate_select`.
        start: First element of the partition, in [0, n].
        stop: First element after it, in [start, n].
        momentum: As for `accumulate_select`.

    Returns:
        `(indices, values)`, a stream.

    Raises:
        TypeError: A tensor has another dtype, or a bound is not an int.
        ValueError: As for `accumulate_select`, or a bound is out of its range.
    """
    numel, device = checks.accumulation(residual, gradients, momentum)
    checks.threshold(threshold)
    checks.integer("start", start, 0, numel)
    checks.integer("stop", stop, start, numel)
    return implementation(device).partition_select(
        residual, gradients, threshold, start, stop, momentum
    )


def hash_select(
    residual: Tensor,
    gradients: Sequence[Tensor],
    threshold: float,
    slots: int,
    slots_per_bucket: int,
    a: int,
    b: int,
    momentum: Momentum | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds gradients, and moves out what reaches a threshold and finds a free slot by its hash.

    Index i hashes to h = ((a·i + b) mod 2**64) >> 32, and to bucket (h · buckets) >> 32. A bucket
    takes `slots_per_bucket` entries; what comes too late stays in the residual. On the CPU the
    lowest indices win, elsewhere any may. Entries that become non-finite need no slot: all move.

    Source: Wang et al., "DRAGONN" (ICML '22), Algorithm 1, which is `slots_per_bucket=1`.

    Args:
        residual: As for `accumulate_select`.
        gradients: As for `accumulate_select`.
        threshold: As for `accumulate_select`.
        slots: The table's slots, at least 1, a multiple of `slots_per_bucket`; below 2**31.
        slots_per_bucket: Entries that share a hash, in [1, 255].
        a: The hash's factor: odd, in [1, 2**64).
        b: The hash's summand, in [0, 2**64).
        momentum: As for `accumulate_select`.

    Returns:
        `(indices, values)`, a stream of at most `slots` finite entries.

    Raises:
        TypeError: A tensor has another dtype, or a number is not an int.
        ValueError: As for `accumulate_select`, or a number is out of its range.
    """
    _, device = checks.accumulation(residual, gradients, momentum)
    checks.threshold(threshold)
    checks.integer("slots_per_bucket", slots_per_bucket, 1, 255)
    checks.integer("slots", slots, 1, checks.MAX_NUMEL)
    if slots % slots_per_bucket != 0:
        raise ValueError(
            f"slots must be a multiple of slots_per_bucket {slots_per_bucket}, got {slots}"
        )
    checks.integer("a", a, 1, _UINT64_MAX)
    if a % 2 == 0:
        raise ValueError(f"a must be odd, got {a}")
    checks.integer("b", b, 0, _UINT64_MAX)
    return implementation(device).hash_select(
        residual, gradients, threshold, slots, slots_per_bucket, a, b, momentum
    )
