"""ExDyna: exclusive partitions, and the sum of all accumulators at the selected indices.

Source: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed
Deep Learning" (CCGrid 2024), algorithm 1.

Symbols: P ranks, k entries wanted, k_i selected in partition i, k' their sum, δ the threshold,
α latency, β time per word.

Steps, after this rank has taken the candidates out of its partition (selectors/online.py):
  1. gather the indices of those that reach δ, and how many candidates reach each of 64 levels
     around it (line 11);
  2. sum all ranks' accumulators there (index_union.py, lines 12-13, 18);
  3. scale δ by the density that was reached (algorithm 5), move blocks between partitions by what
     was selected in them (`Partitions`, algorithm 3), and pass the partitions on: rank r has
     partition (t + r) mod P at step t.

Cost: (2 log P + P - 1) α + 3k (P-1)/P β, with 64 counters beside the indices: an allgather and an
allreduce, as in the paper. Nothing builds up, and the result has about k entries.

Departure from algorithm 5: it multiplies δ by 1 + γ, 1 + γ/4 or 1 - γ after each step; the paper
leaves γ open. By some thousandths, a density that is off by 20 stays off for hundreds of
steps; with error feedback, entries crowd just below the threshold, and any fixed gain is too much
or too little. Here every rank tells how many of its candidates reach each of 64 levels from 0.9 δ
to 1.8 δ, and the one nearest to k is the next δ. Where what reached δ is not within
k (1 ± tolerance), indices are gathered once more in the same step, by that level. Whoever has more
than 1.2 k/P then sends none before. Where no level is within, or in the first step, δ is the exact
k-th magnitude of all candidates (global_threshold.py); where ties at it are too many, each rank
sends its part of k, by how many it has. Where there are too few candidates, all are taken, and the
next step samples anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.accumulator import Scope
from hvd_sparse.collectives.collective import Reduction, TakeAt
from hvd_sparse.collectives.global_threshold import th_re_evaluate
from hvd_sparse.collectives.index_union import IndexUnion
from hvd_sparse.errors import MessageError
from hvd_sparse.streams import SparseStream, sum_of
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

LEVELS = 0.9 * 2.0 ** (torch.arange(64, dtype=torch.float64, device="cpu") / 63)
LEVEL_BYTES = 8 * (1 + LEVELS.numel())
"""What the counts at δ and at all levels take in a message."""
EARLY = 1.2
"""So many times k/P indices are sent before it is known how many reach δ in all."""
BLOCKS = 1024
BLOCK_MULTIPLE = 32
ALPHA = (21, 20)
"""α, as a fraction: partitions stay while none has more than so many times the mean. All of this is
in whole numbers: ranks on other processors must cut alike."""
BETA, GAMMA = 1.1, 0.005
"""β and γ of algorithm 5 in the authors' release; the paper gives no numbers."""
FADING = (4, 5)
"""What a block's count of one step is worth in the next, as a fraction."""
COUNT = 1 << 16
"""The weight of an entry when it is new."""


class ExDyna(IndexUnion):
    """The exchange of ExDyna; its scope is this rank's partition.

    Args:
        tolerance: How far the result's nnz may be from k, as a share of k.
        dynamic: Whether partitions follow the counts; False keeps them as they were cut first.
        as_written: Whether the threshold and the partitions move by algorithms 5 and 3 as the
            paper has them, after a first threshold that is exact.

    Attributes:
        threshold: δ; 0.0 where there is none yet.
        partitions: Where the ranks select.
        selected: k_i of the last step, by partition. f(t), the balance of equation 5, is P times
            the largest over their sum.
    """

    def __init__(
        self,
        transport: Transport,
        numel: int,
        k: int,
        *,
        tolerance: float = 0.1,
        dynamic: bool = True,
        as_written: bool = False,
        wire: Wire = PLAIN,
    ) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.tolerance = tolerance
        self.dynamic = dynamic
        self.as_written = as_written
        self.threshold = 0.0
        self.partitions = Partitions(numel, transport.world_size)
        self.selected = [0] * transport.world_size

    @override
    def scope(self) -> Scope:
        P = self.transport.world_size
        start, stop = self.partitions.span((self.step + self.transport.rank) % P)
        return Scope(start, stop, 1 / P, self.threshold)

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """Algorithm 1, from line 11 on; see `IndexUnion.reduce`."""
        kept, parts = self.estimate(stream)
        rest = stream.without(kept.indices)
        P, step = self.transport.world_size, self.step
        self.selected = [parts[(i - step) % P].numel() for i in range(P)]
        packer = self.packer(stream)
        reduction = self.sum_at(kept, parts, take_at, packer)
        if self.dynamic and self.as_written:
            self.partitions.move(self.selected)
        elif self.dynamic:
            self.partitions.level(reduction.reduced.indices)
        returned = [rest.to(packer.device), reduction.returned]
        return Reduction(reduction.reduced, sum_of(returned, self.numel))

    # -- algorithm 5: online threshold scaling -----------------------------------------------------

    def estimate(self, candidates: SparseStream) -> tuple[SparseStream, list[Tensor]]:
        """Scale the threshold; the candidates that are sent, and all ranks' indices of theirs."""
        if self.k == self.numel:
            self.threshold = 0.0
            return candidates, self.gather(candidates.indices)
        if self.threshold == 0.0:
            return self._exact(candidates)
        if self.as_written:
            return self._scale(candidates)
        P, levels = self.transport.world_size, (self.threshold * LEVELS).float()
        kept = candidates.reaching(self.threshold)
        places = torch.bucketize(candidates.values.abs().nan_to_num(torch.inf), levels, right=True)
        passed = torch.bincount(places, minlength=levels.numel() + 1)
        reach = passed.flip(0).cumsum(0).flip(0)
        reach[0] = kept.nnz  # in the place of what reaches no level
        early = kept.indices if kept.nnz * P <= EARLY * self.k else kept.indices[:0]
        parts, (total, *counts) = self._gather_with_counts(early, reach)
        best = min(range(len(counts)), key=lambda i: abs(counts[i] - self.k))
        slack = self.tolerance * self.k
        if abs(total - self.k) > slack or sum(part.numel() for part in parts) < total:
            if abs(counts[best] - self.k) > slack:
                return self._exact(candidates)
            kept = candidates.reaching(float(levels[best]))
            parts = self.gather(kept.indices)
        self.threshold = float(levels[best])
        return kept, parts

    def _scale(self, candidates: SparseStream) -> tuple[SparseStream, list[Tensor]]:
        """Algorithm 5: what reaches the threshold is sent, whatever its number."""
        kept = candidates.reaching(self.threshold)
        parts = self.gather(kept.indices)
        excess = sum(part.numel() for part in parts) / self.k
        self.threshold *= 1 + (
            GAMMA if excess > BETA else GAMMA / 4 if excess > 1 / BETA else -GAMMA
        )
        return kept, parts

    def _exact(self, candidates: SparseStream) -> tuple[SparseStream, list[Tensor]]:
        """By the k-th magnitude of all; where ties are too many, each rank's part of k."""
        rank = self.transport.rank
        level = th_re_evaluate(candidates.values, max(1, self.k), self.transport)
        kept = candidates.reaching(level)
        (numbers,) = self.gather_counts(kept.nnz)
        total = sum(numbers)
        if total > self.k * (1 + self.tolerance) and kept.isfinite():  # else all goes, to be told
            edges = [self.k * s // total for s in accumulate([0, *numbers])]
            kept = kept.largest(edges[rank + 1] - edges[rank])
        self.threshold = level if total >= self.k * (1 - self.tolerance) else 0.0
        return kept, self.gather(kept.indices)

    def _gather_with_counts(self, indices: Tensor, reach: Tensor) -> tuple[list[Tensor], list[int]]:
        """All ranks' indices, and the sums of their counts, int64 `(65,)`: one message.

        So many of this rank's candidates `reach` δ and each level; non-finite ones do.
        """
        own = self.wire.encode_indices(indices, self.numel)
        messages = self.transport.allgather((reach, *own), channel="indices")
        size = reach.numel() * reach.element_size()
        for message in messages:
            if message.numel() < size:
                raise MessageError(
                    f"a message of levels must have at least {size} bytes, got {message.numel()}"
                )
        counts = torch.stack([message[:size].view(torch.int64) for message in messages])
        parts = [self.wire.decode_indices(message[size:], self.numel) for message in messages]
        return parts, counts.sum(0).tolist()

    # -- state -------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "threshold": self.threshold,
            "blocks": list(self.partitions.blocks),
            "weights": self.partitions.weights.clone(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With another world size partitions are cut anew."""
        if len(state["blocks"]) == self.transport.world_size:
            super().load_state_dict(state)
            self.threshold = float(state["threshold"])
            self.partitions.blocks = list(state["blocks"])
            self.partitions.weights = state["weights"].to(torch.int64, copy=True)


class Partitions:
    """P contiguous ranges of blocks that cover a vector, and how they move between ranks.

    Source: ExDyna, algorithms 2 and 3.

    Departure from algorithm 3: it knows how many entries each partition selected, and moves
    `blk_move` blocks a step between neighbours where one has more than α times the mean and the
    other less than its inverse; the paper leaves these and `min_blk` open. For a strongly layered
    gradient that takes hundreds of steps, and a partition that is just right between an overfull
    and an underfull one stops it. But after the exchange every rank knows all indices, and so the
    entries of each block. Here partitions are cut anew, with equal parts of these counts, which
    fade by a fifth in each step. `min_blk` is 1: no rank is left without a partition, and more
    would hold back blocks of a narrow hot range.

    Attributes:
        block_numel: Elements of a block; what is left over belongs to the last partition.
        blocks: Blocks of each partition.
        weights: `COUNT` for each entry selected in a block of late, int64 `(n_b,)`.
    """

    def __init__(self, numel: int, count: int) -> None:
        self.numel = numel
        self.block_numel = max(1, numel // BLOCKS)
        if self.block_numel >= BLOCK_MULTIPLE:
            self.block_numel -= self.block_numel % BLOCK_MULTIPLE
        total = numel // self.block_numel
        self.blocks = [total // count + (i < total % count) for i in range(count)]
        self.weights = torch.zeros(total, dtype=torch.int64, device="cpu")

    def span(self, partition: int) -> tuple[int, int]:
        """First index of a partition, and the index after its last."""
        edges = [0, *accumulate(self.blocks)]
        stop = edges[partition + 1] * self.block_numel
        last = partition == len(self.blocks) - 1
        return edges[partition] * self.block_numel, self.numel if last else stop

    def move(self, selected: list[int]) -> None:
        """Algorithm 3 as written: by k_i, a block to a neighbour, where one has too much."""
        counts, mean = [float(count) for count in selected], sum(selected) / len(selected)
        of_a_block = self.block_numel * sum(selected) / max(1, self.numel)
        least = max(1, sum(self.blocks) // (4 * len(self.blocks)))
        alpha = ALPHA[0] / ALPHA[1]
        for left in range(len(counts) - 1):
            for giver, taker in ((left, left + 1), (left + 1, left)):
                if counts[giver] <= alpha * mean or counts[taker] >= mean / alpha:
                    continue
                if self.blocks[giver] - 1 >= least:
                    self.blocks[giver] -= 1
                    self.blocks[taker] += 1
                    counts[giver] -= of_a_block
                    counts[taker] += of_a_block
                break

    def level(self, indices: Tensor) -> None:
        """Algorithm 3: give every partition an equal part of the indices that ranks selected."""
        total, count = self.weights.numel(), len(self.blocks)
        if total == 0:
            return
        starts = torch.arange(1, total, dtype=torch.int32, device=indices.device) * self.block_numel
        edges = [0, *torch.searchsorted(indices, starts).tolist(), indices.numel()]
        counts = torch.tensor(edges, dtype=torch.int64, device="cpu").diff()
        self.weights = self.weights * FADING[0] // FADING[1] + COUNT * counts
        shares = [int(part.sum()) for part in self.weights.split(self.blocks)]
        if max(shares) * count * ALPHA[1] <= sum(shares) * ALPHA[0]:
            return
        # Every block has some weight, so that a run of empty ones is cut by its number of blocks.
        least = 1 + sum(shares) // (total * 1_000_000)
        even = (self.weights + least).cumsum(0)
        parts = torch.arange(1, count, dtype=torch.int64, device="cpu")
        cuts = (torch.searchsorted(even, even[-1] * parts // count) + 1).tolist()
        self.blocks = widened([0, *cuts, total], min(1, total // count))


def widened(edges: list[int], least: int) -> list[int]:
    """The widths between ascending edges, each at least `least`, which is at most their mean.

    The first and the last edge stay; others move as little as they must.
    """
    total, count = edges[-1], len(edges) - 1
    for i in range(1, count):
        edges[i] = max(edges[i], edges[i - 1] + least)
    for i in range(count - 1, 0, -1):
        edges[i] = min(edges[i], total - (count - i) * least)
    return [stop - start for start, stop in pairwise(edges)]
