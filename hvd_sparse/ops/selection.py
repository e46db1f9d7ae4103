"""Accumulation and selection: gradients are added, and what is selected moves out.

One pass over the vectors each; `sample_accumulator` reads parts, and changes nothing. Every
operation raises TypeError where a number is not an int, and ValueError where one is out of range.
"""

from __future__ import annotations

from torch import Tensor

from hvd_sparse.ops import _arguments as checks
from hvd_sparse.ops._arguments import MAX_NUMEL, MAX_SEED, Entries
from hvd_sparse.ops._dispatch import on
from hvd_sparse.ops.accumulation import Accumulation


def accumulate_select(
    accumulation: Accumulation, threshold: float, start: int = 0, stop: int | None = None
) -> Entries:
    """Adds gradients to the residual and moves out what reaches a threshold, in one pass.

    An entry that becomes non-finite is moved out too, wherever it is: a rank must not keep it to
    itself. The residual keeps what it held before (0 if that was not finite either): it is finite
    afterwards.

    Source of the partition: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for
    Scalable Distributed Deep Learning" (ExDyna), Algorithm 4.

    Args:
        accumulation: Its residual becomes the sum, and zero where an entry moved out.
        threshold: Least magnitude to move out, >= 0. Zeros stay at any threshold, non-finite
            values at none (NaN stands for infinity here).
        start: First element of the partition out of which entries move, in [0, n].
        stop: First element after it, in [start, n]; None: n.

    Returns:
        `(indices, values)`, a stream `(nnz,)`.
    """
    checks.threshold(threshold)
    checks.integer("start", start, 0, accumulation.numel)
    stop = checks.integer(
        "stop", accumulation.numel if stop is None else stop, start, accumulation.numel
    )
    return on(accumulation.device).accumulate_select(accumulation, threshold, start, stop)


def accumulate_topk(accumulation: Accumulation, k: int) -> tuple[Tensor, Tensor, float]:
    """Adds gradients to the residual and moves out the k largest magnitudes, exactly.

    Args:
        accumulation: As for `accumulate_select`; entries that become non-finite are the largest.
        k: How many entries to move out, >= 0; fewer move if fewer are nonzero. Of equal magnitudes
            the lower indices move.

    Returns:
        `(indices, values, threshold)`: a stream, and the k-th largest magnitude (0.0 with fewer
        than k nonzeros, inf for k = 0).
    """
    checks.integer("k", k, 0)
    return on(accumulation.device).accumulate_topk(accumulation, k)


def accumulate_group_topk(accumulation: Accumulation, k: int, group_numel: int = 512) -> Entries:
    """Adds gradients and moves out the k largest magnitudes of every group of consecutive elements.

    Source: Renggli et al., "SparCML" (SC '19), section 8: k out of every 512 elements.

    k is in [1, group_numel]. Fewer move where fewer are nonzero, and of equal magnitudes the lower
    indices. The last group may be shorter. Returns `(indices, values)`, a stream.
    """
    checks.integer("group_numel", group_numel, 1, MAX_NUMEL)
    checks.integer("k", k, 1, group_numel)
    return on(accumulation.device).accumulate_group_topk(accumulation, k, group_numel)


def hash_select(
    accumulation: Accumulation, threshold: float, slots: int, slots_per_bucket: int, seed: int
) -> Entries:
    """Adds gradients, and moves out what reaches a threshold and wins a slot by its hash.

    An index hashes to 32 bits h by two rounds of multiplying and shifting (`reference.mixed32`),
    and to bucket (h · buckets) >> 32, so that columns, rows and runs spread like random indices. A
    bucket takes the `slots_per_bucket` largest magnitudes that hash to it, of equal ones the lower
    indices; the others stay in the residual. Entries that become non-finite need no slot: all move.

    Source: Wang et al., "DRAGONN" (ICML '22), Algorithm 1, which is `slots_per_bucket=1`.

    The table has `slots` below 2**31, a multiple of `slots_per_bucket` in [1, 255]; the seed of the
    hash is in [0, 2**64). For the rest, see `accumulate_select`. Returns `(indices, values)`, a
    stream of at most `slots` finite entries.
    """
    checks.threshold(threshold)
    checks.integer("slots_per_bucket", slots_per_bucket, 1, 255)
    checks.integer("slots", slots, 1, MAX_NUMEL)
    if slots % slots_per_bucket != 0:
        raise ValueError(
            f"slots must be a multiple of slots_per_bucket {slots_per_bucket}, got {slots}"
        )
    checks.integer("seed", seed, 0, MAX_SEED)
    return on(accumulation.device).hash_select(
        accumulation, threshold, slots, slots_per_bucket, seed
    )


def sample_accumulator(accumulation: Accumulation, runs: int, run_numel: int, seed: int) -> Tensor:
    """Magnitudes at random places of what `accumulate_select` would make of the residual.

    Run r is one of the stretches from multiple to multiple of `run_numel` with numbers from
    r·m // runs up to (r + 1)·m // runs, where m = n // run_numel: every part of the vector has its
    share, and no order within it, such as a layer's width, meets that of the sample. Memory is read
    by the cache line: 16 consecutive elements cost little more than one does.

    There are `runs` in `[0, m]`, each of at least one element; the seed is in [0, 2**64). Returns
    float32 `(runs · run_numel,)`, in the order of the elements.
    """
    checks.integer("run_numel", run_numel, 1, MAX_NUMEL)
    checks.integer("runs", runs, 0, accumulation.numel // run_numel)
    checks.integer("seed", seed, 0, MAX_SEED)
    return on(accumulation.device).sample_accumulator(accumulation, runs, run_numel, seed)
