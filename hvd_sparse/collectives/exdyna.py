"""ExDyna: exclusive partitions, and the sum of all accumulators at the selected indices.

Source: Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed
Deep Learning" (CCGrid 2024), algorithm 1.

Symbols: P ranks, k entries wanted, k_i selected in partition i, k' their sum, δ the threshold,
α latency, β time per word.

Steps, after this rank has taken the candidates out of its partition (selectors/online.py):
  1. scale δ by the density that it would reach (algorithm 5), and keep what reaches it;
  2. gather the indices, and sum all ranks' accumulators there (index_union.py, lines 11-13, 18);
  3. move blocks between partitions by what was selected in them (partitions.py, algorithm 3), and
     pass the partitions on: rank r has partition (t + r) mod P at step t.

Cost: (2 log P + 2 (P-1)) α + 3k (P-1)/P β, with one message of 64 counters. Nothing builds up, and
the result has about k entries.

Departure from algorithm 5: it multiplies δ by 1.005, 1.00125 or 0.995 after each step, so that a
density that is off by 20 stays off for hundreds of steps; and with error feedback, where entries
crowd just below the threshold, any fixed gain is too much or too little. Here every rank tells how
many of its candidates reach each of 64 levels from 0.9 δ to 1.8 δ, and all take the level that is
nearest to k in the same step. Where none is within k (1 ± tolerance), or in the first step, δ is
the exact k-th magnitude of all candidates (global_threshold.py), and ties are cut to each rank's
part. Where there are too few candidates, all are taken, and the next step samples anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hvd_sparse import ops
from hvd_sparse.accumulator import Scope
from hvd_sparse.collectives.base import Reduction, TakeAt
from hvd_sparse.collectives.global_threshold import th_re_evaluate
from hvd_sparse.collectives.index_union import IndexUnion
from hvd_sparse.collectives.partitions import Partitions
from hvd_sparse.streams import SparseStream, sum_of
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

LEVELS = 0.9 * 2.0 ** (torch.arange(64, dtype=torch.float64) / 63)


class ExDyna(IndexUnion):
    """The exchange of ExDyna; its scope is this rank's partition.

    Args:
        transport: See `Collective`.
        numel: See `Collective`.
        k: See `Collective`.
        tolerance: How far the result's nnz may be from k, as a share of k.
        dynamic: Whether partitions follow the counts; False keeps them as they were cut first.
        wire: See `Collective`.

    Attributes:
        threshold: δ; 0.0 where there is none yet.
        partitions: Where the ranks select.
        selected: k_i of the last step, by partition.
    """

    def __init__(
        self,
        transport: Transport,
        numel: int,
        k: int,
        *,
        tolerance: float = 0.1,
        dynamic: bool = True,
        wire: Wire = PLAIN,
    ) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.tolerance = tolerance
        self.dynamic = dynamic
        self.threshold = 0.0
        self.partitions = Partitions(numel, transport.world_size)
        self.selected = [0] * transport.world_size

    def scope(self) -> Scope:
        """See `Collective.scope`."""
        P = self.transport.world_size
        start, stop = self.partitions.span((self.step + self.transport.rank) % P)
        return Scope(start, stop, 1 / P, self.threshold)

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """Algorithm 1, from line 11 on; see `IndexUnion.reduce`."""
        kept = self.estimate(stream)
        rest = SparseStream(*ops.difference(*stream.payload(), kept.indices), self.numel)
        reduction = super().reduce(kept, take_at)
        if self.dynamic:
            self.partitions.level(reduction.reduced.indices)
        return Reduction(reduction.reduced, sum_of([rest, reduction.returned], self.numel))

    # -- algorithm 5: online threshold scaling -----------------------------------------------------

    def estimate(self, candidates: SparseStream) -> SparseStream:
        """Scale the threshold, and keep the candidates that reach it."""
        if self.k == self.numel:
            levels = torch.zeros(1)
        elif self.threshold > 0.0:
            levels = (self.threshold * LEVELS).float()
        else:
            levels = self._exact_level(candidates)
        counts = self._count(candidates, levels)
        best = self._nearest(counts)
        if abs(sum(counts[best]) - self.k) > self.tolerance * self.k and self.threshold > 0.0:
            levels = self._exact_level(candidates)
            counts, best = self._count(candidates, levels), 0
        return self._keep(candidates, float(levels[best]), counts[best])

    def _exact_level(self, candidates: SparseStream) -> torch.Tensor:
        return torch.tensor([th_re_evaluate(candidates.values, max(1, self.k), self.transport)])

    def _count(self, candidates: SparseStream, levels: torch.Tensor) -> list[list[int]]:
        """For each level, how many candidates every rank has that reach it; non-finite ones do."""
        places = torch.bucketize(candidates.values.abs().nan_to_num(torch.inf), levels, right=True)
        passed = torch.bincount(places, minlength=levels.numel() + 1)
        reach = passed.flip(0).cumsum(0).flip(0)[1:]
        gathered = self.transport.allgather((reach,), channel="levels")
        return torch.stack([message.view(torch.int64) for message in gathered], dim=1).tolist()

    def _nearest(self, counts: Sequence[Sequence[int]]) -> int:
        off = [abs(sum(shares) - self.k) for shares in counts]
        return off.index(min(off))

    def _keep(self, candidates: SparseStream, level: float, shares: list[int]) -> SparseStream:
        """What reaches the level; where ties are too many, each rank's part of k."""
        P, rank, total = self.transport.world_size, self.transport.rank, sum(shares)
        kept = candidates.where(candidates.values.abs().nan_to_num(torch.inf) >= level)
        if total > self.k * (1 + self.tolerance) and kept.isfinite():
            edges = [self.k * s // total for s in (sum(shares[:r]) for r in range(P + 1))]
            shares = [stop - start for start, stop in pairwise(edges)]
            rest = ops.Accumulation(kept.values.clone())
            order, values, _ = ops.accumulate_topk(rest, shares[rank])
            kept = SparseStream(kept.indices[order.long()], values, self.numel)
        enough = total >= self.k * (1 - self.tolerance)
        self.threshold = level if enough else 0.0
        self.selected = [shares[(i - self.step) % P] for i in range(P)]
        return kept

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Collective.state_dict`."""
        return {
            **super().state_dict(),
            "threshold": self.threshold,
            "blocks": list(self.partitions.blocks),
            "weights": self.partitions.weights.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collective.load_state_dict`; with another world size partitions are cut anew."""
        if len(state["blocks"]) == self.transport.world_size:
            super().load_state_dict(state)
            self.threshold = float(state["threshold"])
            self.partitions.blocks = list(state["blocks"])
            self.partitions.weights = state["weights"].clone()
