"""Exclusive partitions of a vector: ExDyna's blocks, and how they move between ranks.

Source: Yoon and Oh, "ExDyna" (CCGrid 2024), algorithms 2 and 3.

Symbols: P partitions, n_b blocks of `block_numel` elements.

Departure from algorithm 3: it knows how many entries each partition selected, and moves one block a
step between neighbours where one has more than 1.05 times the mean and the other less than its
inverse. For a strongly layered gradient that takes hundreds of steps, a hot block at the edge of a
partition goes to and fro, and a partition that is just right between an overfull and an underfull
one stops all movement. But after the exchange every rank knows all indices, and so the entries of
each block. Here the partitions are cut anew, so that each has an equal part of these counts, which
fade by a fifth with every step.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

BLOCKS = 1024
BLOCK_MULTIPLE = 32
ALPHA = 1.05
"""α: partitions stay as they are while none has more than this many times the mean."""
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
            indices: What all ranks selected in a step, int32 `(K,)`.
        """
        total, count = self.weights.numel(), len(self.blocks)
        if total == 0:
            return
        places = (indices.long() // self.block_numel).clamp_(max=total - 1)
        self.weights = FADING * self.weights + torch.bincount(places, minlength=total)
        shares = [float(part.sum()) for part in self.weights.split(self.blocks)]
        if max(shares) <= ALPHA * sum(shares) / count:
            return
        # Every block has some weight, so that a run of empty ones is cut by its number of blocks.
        least = 1e-6 * self.weights.mean()
        even = (self.weights + least).cumsum(0)
        wanted = even[-1] * torch.arange(1, count, dtype=torch.float64) / count
        cuts = (torch.searchsorted(even, wanted) + 1).tolist()
        self.blocks = [stop - start for start, stop in pairwise([0, *cuts, total])]
