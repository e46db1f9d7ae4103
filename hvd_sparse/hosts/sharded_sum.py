"""A vector that the ranks of a host share: cut into shards, and put together from their sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from hvd_sparse.streams import Sum

SHARD_ALIGNMENT = 16
"""Elements: shards of float32 begin on cache lines, so that no line is written by two ranks."""


def shard_bounds(numel: int, local_size: int) -> list[int]:
    """Where L shards of a vector begin and end: L + 1 ascending bounds; shards may be empty."""
    ends = (numel * i // local_size for i in range(local_size))
    aligned = [min(numel, -(-end // SHARD_ALIGNMENT) * SHARD_ALIGNMENT) for end in ends]
    return [*aligned, numel]


class ShardedSum:
    """The sums of all shards of a vector, side by side.

    Args:
        shards: In the order of the shards.
        bounds: See `shard_bounds`.
    """

    def __init__(self, shards: Sequence[Sum], bounds: Sequence[int]) -> None:
        self.shards = tuple(shards)
        self._bounds = tuple(bounds)

    @property
    def nnz(self) -> int:
        """Entries that the shards hold."""
        return sum(shard.nnz for shard in self.shards)

    def isfinite(self) -> bool:
        """Whether every value is finite."""
        return all(shard.isfinite() for shard in self.shards)

    def write(self, out: Tensor, scale: float) -> None:
        """Write the vector times `scale`; see `SparseStream.write`."""
        for shard, (start, stop) in zip(self.shards, pairwise(self._bounds), strict=True):
            shard.write(out[start:stop], scale)
