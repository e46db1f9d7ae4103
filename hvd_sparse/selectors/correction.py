"""Corrects a selection in the same step, where its threshold was off.

DGC calls the first one hierarchical selection (Lin et al., arXiv 1712.01887). Both are
exact, so that no part of the tensor is favoured: a stream cut in the order of its indices would
starve its tail.
"""

from __future__ import annotations

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator
from hvd_sparse.streams import SparseStream, merge

MOST_TIMES_K = 4
"""No rank sends more than this many times its part of k in a step, whatever its selector takes."""


def keep_largest(
    accumulator: Accumulator, stream: SparseStream, k: int
) -> tuple[SparseStream, float]:
    """Put all but the `k` largest entries of a stream back; returns them, and the k-th magnitude.

    O(nnz), since what passed a threshold that is too low holds the top k.
    """
    rest = ops.Accumulation(stream.values.clone())
    order, values, threshold = ops.accumulate_topk(rest, k)
    # What is kept left a zero there, and so did what is not finite.
    left = SparseStream(stream.indices, rest.residual, stream.numel)
    if ops.backend(stream.indices.device) != "cuda":  # there it costs a wait for their number
        left = left.reaching(0.0)
    left.add_to(accumulator.residual)
    return SparseStream(stream.indices[order.long()], values, stream.numel), threshold


def take_more(accumulator: Accumulator, stream: SparseStream, k: int) -> tuple[SparseStream, float]:
    """Take the largest of what is left, until there are `k` entries.

    The stream has all that reached the threshold, and fewer than k entries. Returns all entries,
    and the k-th magnitude.
    """
    more, threshold = accumulator.topk(k - stream.nnz)
    return merge([stream, more], stream.numel), threshold


def hold_back(accumulator: Accumulator, stream: SparseStream, k: int) -> SparseStream:
    """Put back what goes beyond `MOST_TIMES_K` times `k` entries: the smallest.

    A threshold can be too low, and where a rank's gradient overflows, everything is taken that is
    not finite. Of that the k largest do as well: one such entry tells all ranks that the step does
    not count. As a rule the stream itself is returned.
    """
    most = MOST_TIMES_K * k
    return stream if stream.nnz <= most else keep_largest(accumulator, stream, most)[0]
