"""Exclusive partitions of a vector: ExDyna's blocks, and how they move between ranks.

Source: Yoon and Oh, "ExDyna" (CCGrid 2024), algorithms 2 and 3.

Symbols: P partitions, n_b blocks of `block_numel` elements.

Departure from algorithm 3: it knows how many entries each partition selected, and moves one block a
step between neighbours where one has more than 1.05 times the mean and the other less than its
inverse. For a strongly layered gradient that takes hundreds of steps, a hot block at the edge of a
partition goes to and fro, and a partition that is just right between an overfull and an underfull
one stops all movement. But after the exchange every rank knows all indices, and so the entries of
each block. Here the partitions are cut anew, so that each has an equal part of these counts, which
fade by a fifth with every step. `min_blk` is 1: no rank is left without a partition, and more would
hold back blocks of a hot range that is a few blocks wide.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

BLOCKS = 1024
BLOCK_MULTIPLE = 32
ALPHA = 1.05
"""α: partitions stay as they are while none has more than this many times the mean."""
LEAST_BLOCKS = 1
"""min_blk: a partition has as many blocks at least, where there are enough for all."""
FADING = 0.8
"""What a block's count of one step is worth in the next."""


class Partitions:
    """P contiguous ranges of blocks that cover a vector.

    Args:
        numel: n.
        count: P, at least 1.

    Attributes:
        block_numel: Elements of a block; what is left over belongs to the last partition.
        blocks: Blocks of each partition.
        weights: Entries selected in each block of late, float64 `(n_b,)`.
    """

    def __init__(self, numel: int, count: int) -> None:
        self.numel = numel
        self.block_numel = max(1, numel // BLOCKS)
        if self.block_numel >= BLOCK_MULTIPLE:
            self.block_numel -= self.block_numel % BLOCK_MULTIPLE
        total = numel // self.block_numel
        self.blocks = [total // count + (i < total % count) for i in range(count)]
        self.weights = torch.zeros(total, dtype=torch.float64)

    def span(self, partition: int) -> tuple[int, int]:
        """First index of a partition, and the index after its last."""
        edges = [0, *accumulate(self.blocks)]
        stop = edges[partition + 1] * self.block_numel
        last = partition == len(self.blocks) - 1
        return edges[partition] * self.block_numel, self.numel if last else stop

    def level(self, indices: Tensor) -> None:
        """Algorithm 3: give every partition an equal part of what is selected.

        Args:
            indices: What all ranks selected in a step, int32 `(K,)` ascending.
        """
        total, count = self.weights.numel(), len(self.blocks)
        if total == 0:
            return
        starts = torch.arange(1, total, dtype=torch.int32) * self.block_numel
        edges = [0, *torch.searchsorted(indices, starts).tolist(), indices.numel()]
        counts = torch.tensor(edges, dtype=torch.float64).diff()
        self.weights = FADING * self.weights + counts
        shares = [float(part.sum()) for part in self.weights.split(self.blocks)]
        if max(shares) <= ALPHA * sum(shares) / count:
            return
        # Every block has some weight, so that a run of empty ones is cut by its number of blocks.
        least = 1e-6 * self.weights.mean()
        even = (self.weights + least).cumsum(0)
        wanted = even[-1] * torch.arange(1, count, dtype=torch.float64) / count
        cuts = (torch.searchsorted(even, wanted) + 1).tolist()
        self.blocks = widened([0, *cuts, total], min(LEAST_BLOCKS, total // count))


def widened(edges: list[int], least: int) -> list[int]:
    """The widths between ascending edges, where each is to be at least `least`.

    Args:
        edges: The first and the last stay; others move as little as they must.
        least: At most the mean width.
    """
    total, count = edges[-1], len(edges) - 1
    for i in range(1, count):
        edges[i] = max(edges[i], edges[i - 1] + least)
    for i in range(count - 1, 0, -1):
        edges[i] = min(edges[i], total - (count - i) * least)
    return [stop - start for start, stop in pairwise(edges)]
