"""Exclusive partitions of a vector: ExDyna's blocks, and how they move between ranks.

Source: Yoon and Oh, "ExDyna" (CCGrid 2024), algorithms 2 and 3.

Symbols: P partitions, n_b blocks of `block_numel` elements, k_i entries selected in partition i.

Departures from algorithm 3:
  * It moves one block between neighbours where one has more than α times the mean and the other
    less than 1/α: too slow by hundreds of steps for strongly layered gradients, and stuck where the
    partition between an overfull and an underfull one is just right. Here two neighbours move as
    many blocks as would level them, wherever they differ by more than α.
  * A partition keeps at least n_b/(32P) blocks, not n_b/(4P): what a hot layer needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

BLOCKS = 1024
BLOCK_MULTIPLE = 32
ALPHA = 1.05
"""α: neighbours whose counts differ by less stay as they are."""


class Partitions:
    """P contiguous ranges of blocks that cover a vector.

    Args:
        numel: n.
        count: P, at least 1.

    Attributes:
        block_numel: Elements of a block; what is left over belongs to the last partition.
        blocks: Blocks of each partition.
    """

    def __init__(self, numel: int, count: int) -> None:
        self.numel = numel
        self.block_numel = max(1, numel // BLOCKS)
        if self.block_numel >= BLOCK_MULTIPLE:
            self.block_numel -= self.block_numel % BLOCK_MULTIPLE
        total = numel // self.block_numel
        self.blocks = [total // count + (i < total % count) for i in range(count)]
        self.least = total // (32 * count)

    def span(self, partition: int) -> tuple[int, int]:
        """First index of a partition, and the index after its last."""
        edges = [0, *accumulate(self.blocks)]
        stop = edges[partition + 1] * self.block_numel
        last = partition == len(self.blocks) - 1
        return edges[partition] * self.block_numel, self.numel if last else stop

    def level(self, selected: Sequence[int]) -> None:
        """Algorithm 3: move blocks between neighbours, from the one that selected more.

        Args:
            selected: k_i, entries that were selected in each partition.
        """
        counts = [float(count) for count in selected]
        for left in range(len(counts) - 1):
            right = left + 1
            giver, taker = (left, right) if counts[left] > counts[right] else (right, left)
            if counts[giver] <= ALPHA * counts[taker]:
                continue
            per_block = counts[giver] / max(1, self.blocks[giver])
            wished = max(1, int((counts[giver] - counts[taker]) / 2 / per_block))
            moved = min(wished, max(0, self.blocks[giver] - max(1, self.least)))
            self.blocks[giver] -= moved
            self.blocks[taker] += moved
            counts[giver] -= moved * per_block
            counts[taker] += moved * per_block
