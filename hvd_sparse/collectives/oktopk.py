"""Ok-Topk: a sparse allreduce of O(k) volume.

Source: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP '22),
section 3 and Algorithm 1. It computes Topk(Σ_i Topk(G_i)): the inner Topk is the selector's, the
outer one is done here.

Symbols: P ranks, n elements, k entries wanted, τ `repartition_interval`, τ′ `threshold_interval`,
α latency, β time per word. Rank i owns region i, the indices from `boundaries[i-1]` up to
`boundaries[i]`.

Steps:
  1. every τ steps, agree on boundaries that balance the local top-k entries (`space_repartition`);
  2. send each region to its owner, who sums it (`split_and_reduce`);
  3. every τ′ steps, evaluate the global threshold exactly (`th_re_evaluate`);
  4. gather what passes it everywhere; where the owners' shares differ much, level them before
     (`balance_and_allgather`);
  5. return the local entries that are not in the result (line 14's complement).

Cost, at most: (2P + 2 log P) α + 6k (P-1)/P β (equation 3); at least 2k (P-1)/P β (theorem 3.1).
In one step after all large entries have jumped into one region, its owner may send a third more.

Departures from the paper:
  * The exact global threshold comes from counters instead of gathered values
    (global_threshold.py).
  * The paper reuses a global threshold as it is. Here the gathered messages also tell how many
    entries pass each of some 70 levels around it, and before the next step every rank picks the
    level that is nearest to a few percent above k. Of a result that is above k (1 + tolerance), the
    k largest are applied; where one is below k (1 - tolerance), or no level is near, the threshold
    is evaluated exactly in the same step, and what is missing is gathered. Ties at an exact
    threshold are cut by rank and index. So the result holds k within the tolerance in every step.
  * The paper asks for the owners' shares in every step. Here the counts of the last step tell them.
    A round of their own asks for them only after an imbalance, and where the threshold is evaluated
    exactly. Without it no owner sends more than 1.75 k/P entries, its largest, for the bound's
    sake. The others wait, and the counts tell of the imbalance.
  * The paper levels shares where the largest exceeds four times the average, which can never be
    with up to four ranks, although one that sends all of the result P - 1 times is over the bound
    of 6k (P-1)/P from three ranks on. Here they are levelled in that case, too.
  * Where one owner received more than twice the average, which is what the bound leaves to the
    split phase, the regions are drawn anew in the next step: entries that move do not cost
    2k (P-1) words until τ steps are over.
  * A lossy wire rounds values in both phases; whoever encodes takes the error back where the entry
    is in the result. The other entries go back whole to where they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.collectives.global_threshold import (
    LEVELS,
    counts_at_levels,
    nearest_level,
    th_re_evaluate,
    threshold_at,
)
from hvd_sparse.cost_model import Work
from hvd_sparse.magnitude import magnitude_keys, threshold_key
from hvd_sparse.streams import Part, SparseStream, merge, sum_of, unapplied
from hvd_sparse.topology import allgather_loads, batches
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Packer, Wire
from hvd_sparse.wire.messages import check_bytes

AIM_SHARE = 0.03
"""How far above k a threshold is aimed, as a share of k: what is too much is dropped after it was
gathered, what is missing costs more rounds."""
AIM_DEVIATIONS = 2.0
"""The same in square roots of k, by which a count differs from what is expected by chance."""
UNEVEN_FACTOR = 2.0
"""Times the average that an owner may receive, so that the gathering, too, stays in the bound."""
MOST_SHARE = 1.75
"""Times k/P that an owner may gather without asking for the others' shares: with what it sent in
the split phase, and some chance, it stays in the bound of 6k (P-1)/P words."""
FEW_ENTRIES = 64
"""A message with so many is as quick as one with fewer: they are neither levelled nor held back."""
HEAD_BYTES = 4 * (LEVELS + 1)
"""What comes before the entries that are gathered: counts at all levels, and what was received."""

Span = tuple[int, int]
"""Elements from the first of these up to the second."""


class OkTopk(Collective):
    """The O(k) sparse allreduce.

    Args:
        k: See `Collective`; the result holds about k entries too.
        repartition_interval: τ, steps from one repartition to the next, at least 1.
        threshold_interval: τ′, steps from one exact global threshold to the next, at least 1.
        balance_factor: Shares are levelled where the largest exceeds this many times the average,
            or a rank would send more than in levelling and gathering together.
        tolerance: How far the result's nnz may be from k, as a share of k.

    Attributes:
        global_threshold: What entries passed in the last step; 0.0 where there is none.
        boundaries: Where regions end, but for the last, int64 `(P-1,)`.
        regions_are_uneven: Whether one owner received far more than the others.
        level_counts: How many reduced entries of each rank pass each level around the threshold,
            int32 `(P, LEVELS)`; zeros where that is not known.
    """

    def __init__(
        self,
        transport: Transport,
        numel: int,
        k: int,
        *,
        repartition_interval: int = 64,
        threshold_interval: int = 32,
        balance_factor: float = 4.0,
        tolerance: float = 0.1,
        wire: Wire = PLAIN,
    ) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.repartition_interval = repartition_interval
        self.threshold_interval = threshold_interval
        self.balance_factor = balance_factor
        self.tolerance = tolerance
        self.global_threshold = 0.0
        self.boundaries = torch.zeros(transport.world_size - 1, dtype=torch.int64, device="cpu")
        self.regions_are_uneven = False
        self.level_counts = torch.zeros(
            transport.world_size, LEVELS, dtype=torch.int32, device="cpu"
        )
        self._received = 0

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """Algorithm 1, from line 5 on; see `Collective.reduce`."""
        if self.step % self.repartition_interval == 0 or self.regions_are_uneven:
            self.boundaries = self.space_repartition(stream)
        packer = self.packer(stream)
        reduced_topk = self.split_and_reduce(stream, packer)
        due = self.step % self.threshold_interval == 0
        u = self.balance_and_allgather(reduced_topk, packer, re_evaluate=due)
        self.step += 1
        self.transport.worked(Work(selected_entries=reduced_topk.nnz + stream.nnz))
        return Reduction(u, unapplied(stream, [packer.lost(self.numel)], u))

    # -- phase 1: split and reduce (section 3.1.1) -------------------------------------------------

    def space_repartition(self, stream: SparseStream) -> Tensor:
        """Boundaries at the averaged P-quantiles of the ranks' indices, int64 `(P-1,)`."""
        P = self.transport.world_size
        shares = torch.arange(1, P, dtype=torch.int64, device="cpu")
        if stream.nnz:
            local = stream.indices[shares * stream.nnz // P].long()
        else:
            local = shares * self.numel // P
        return self.transport.allreduce_sum(local, channel="boundaries") // P

    def split_and_reduce(self, stream: SparseStream, packer: Packer) -> SparseStream:
        """Send each region's entries to its owner; sum those that come for this rank's own region.

        At step s rank r sends to r + s and receives from r - s, so that no owner is everybody's
        destination at once; while a batch of messages is under way, the batch before is summed.
        """
        P, rank = self.transport.world_size, self.transport.rank
        regions = self._cut(stream)
        span = self._spans()[rank]
        total, arrived = packer.land(regions[rank]).to_stream(self.numel), list[SparseStream]()
        self._received = 0
        for batch in batches(P):
            handles = [
                self.transport.exchange(
                    packer.pack(regions[(rank + s) % P])[0],
                    (rank + s) % P,
                    (rank - s) % P,
                    channel="split",
                )
                for s in batch
            ]
            total = self._sum(total, arrived)
            arrived = [self._read(handle.received(), packer, span) for handle in handles]
            self._received += sum(part.nnz for part in arrived)
        return self._sum(total, arrived)

    def _spans(self) -> list[Span]:
        """Every rank's region."""
        return list(pairwise([0, *self.boundaries.tolist(), self.numel]))

    def _cut(self, stream: SparseStream) -> list[Part]:
        """The stream's entries in every rank's region."""
        ends = self.boundaries.to(torch.int32).numpy()
        cuts = stream.indices.numpy().searchsorted(ends).tolist()
        stretches = pairwise([0, *cuts, stream.nnz])
        return [
            Part.of(stream.slice(*positions), *span)
            for positions, span in zip(stretches, self._spans(), strict=True)
        ]

    def _read(self, message: Tensor, packer: Packer, span: Span) -> SparseStream:
        return packer.read(message, *span).to_stream(self.numel)

    def _sum(self, total: SparseStream, arrived: Sequence[SparseStream]) -> SparseStream:
        if not arrived:
            return total
        streams = (total, *arrived)
        self.transport.worked(Work(sum(stream.nnz for stream in streams)))
        return merge(streams, self.numel)

    # -- phase 2: balance and allgather (section 3.1.2) --------------------------------------------

    def balance_and_allgather(
        self, reduced_topk: SparseStream, packer: Packer, *, re_evaluate: bool
    ) -> SparseStream:
        """Take the global top k out of the reduced regions and bring it to every rank."""
        shares = None if re_evaluate else self._follow_threshold()
        if shares is None:
            return self._gather_exactly(reduced_topk, packer)
        chosen = reduced_topk.reaching(self.global_threshold)
        most = max(FEW_ENTRIES, int(MOST_SHARE * self.k / self.transport.world_size))
        if self.regions_are_uneven or max(shares) > most:
            shares = self._gather_counts(chosen.nnz)
            if not self._is_near(sum(shares)):
                return self._gather_exactly(reduced_topk, packer)
            return self._trimmed(self._level_and_gather(chosen, shares, reduced_topk, packer))
        sent = chosen.largest(most)
        u = self._gather(sent, self._spans(), reduced_topk, packer)
        if u.nnz < (1 - self.tolerance) * self.k:
            u = sum_of([u, self._gather_missing(sent, reduced_topk, packer)], self.numel)
        return self._trimmed(u)

    def _follow_threshold(self) -> list[int] | None:
        """Move the threshold to where the last step's counts are nearest to a little above k.

        Returns:
            How many entries each rank had there, or None where that is too far from k.
        """
        if self.global_threshold == 0.0:
            return None
        totals: list[int] = self.level_counts.sum(0).tolist()
        level = nearest_level(totals, self._aimed())
        if not self._is_near(totals[level]):
            return None
        self.global_threshold = threshold_at(self.global_threshold, level)
        shares: list[int] = self.level_counts[:, level].tolist()
        return shares

    def _aimed(self) -> float:
        """How many entries to aim at, so that hardly ever fewer than k come."""
        return self.k + max(AIM_SHARE * self.k, AIM_DEVIATIONS * sqrt(self.k))

    def _is_near(self, total: int) -> bool:
        """Whether so many entries may be gathered, to apply k of them."""
        return (1 - self.tolerance) * self.k <= total <= self._aimed() + self.tolerance * self.k

    def _gather_exactly(self, reduced_topk: SparseStream, packer: Packer) -> SparseStream:
        """The top k by an exact threshold."""
        chosen, shares = self._select_exactly(reduced_topk)
        return self._level_and_gather(chosen, shares, reduced_topk, packer)

    def _gather_missing(
        self, sent: SparseStream, reduced_topk: SparseStream, packer: Packer
    ) -> SparseStream:
        """What the top k by an exact threshold has beside what was sent."""
        chosen, _ = self._select_exactly(reduced_topk)
        rest = chosen.without(sent.indices)
        return self._level_and_gather(rest, self._gather_counts(rest.nnz), reduced_topk, packer)

    def _level_and_gather(
        self,
        chosen: SparseStream,
        shares: Sequence[int],
        reduced_topk: SparseStream,
        packer: Packer,
    ) -> SparseStream:
        """Bring what the ranks have chosen to every rank, as much from each where it matters."""
        spans = self._spans()
        if self._is_unbalanced(shares):
            chosen = self._balance(chosen, shares, packer)
            spans = [(0, self.numel)] * len(spans)  # entries have left their owners' regions
        return self._gather(chosen, spans, reduced_topk, packer)

    def _gather(
        self,
        chosen: SparseStream,
        spans: Sequence[Span],
        reduced_topk: SparseStream,
        packer: Packer,
    ) -> SparseStream:
        """Bring entries to every rank, and with them what the next step needs to know."""
        rank = self.transport.rank
        counts = ops.queued(counts_at_levels(reduced_topk.values, self.global_threshold))
        received = torch.tensor([self._received], dtype=torch.int32, device="cpu")
        payload, own = packer.pack(Part.of(chosen, *spans[rank]))
        messages = self.transport.allgather((counts, received, *payload), channel="allgather")
        for message in messages:
            check_bytes(self.wire.name, "counts at levels", message[:HEAD_BYTES], HEAD_BYTES)
        heads = torch.stack([message[:HEAD_BYTES].view(torch.int32) for message in messages])
        self.level_counts, entries = heads[:, :-1].clone(), heads[:, -1].tolist()
        even = max(self.k, FEW_ENTRIES, UNEVEN_FACTOR * sum(entries) / len(entries))
        self.regions_are_uneven = max(entries) > even
        parts = [
            packer.land(own).to_stream(self.numel)
            if source == rank
            else self._read(message[HEAD_BYTES:], packer, spans[source])
            for source, message in enumerate(messages)
        ]
        return SparseStream.concatenate(parts, self.numel)

    def _trimmed(self, u: SparseStream) -> SparseStream:
        """The k largest, where there are too many: the same ones on every rank."""
        return u if u.nnz <= (1 + self.tolerance) * self.k else u.largest(self.k)

    def _is_unbalanced(self, shares: Sequence[int]) -> bool:
        """Whether one share is far above the average, or gathering alone would pass the bound."""
        P, total = len(shares), sum(shares)
        if max(shares) > self.balance_factor * total / P:
            return True
        return max(allgather_loads(shares)) > 2 * total * (P - 1) / P

    def _gather_counts(self, *counts: int) -> list[Any]:
        """Every rank's count; of several counts, every rank's, in lists of their own."""
        mine = torch.tensor(counts, dtype=torch.int64, device="cpu")
        gathered = self.transport.allgather((mine,), channel="shares")
        columns = torch.stack([message.view(torch.int64) for message in gathered]).T.tolist()
        return columns[0] if len(counts) == 1 else columns

    def _select_exactly(self, reduced_topk: SparseStream) -> tuple[SparseStream, list[int]]:
        """Evaluate the threshold anew; this rank's part of the top k, and every rank's share."""
        if self.k == self.numel:
            self.global_threshold = 0.0  # density 1: no threshold may leave anything behind
        else:
            self.global_threshold = th_re_evaluate(reduced_topk.values, self.k, self.transport)
        # With room for all, sums that cancelled out pass too.
        key = threshold_key(self.global_threshold) if self.global_threshold > 0.0 else 0
        keys = magnitude_keys(reduced_topk.values)
        above, ties = self._gather_counts(int((keys > key).sum()), int((keys == key).sum()))
        passing = reduced_topk.where(keys >= key)
        if sum(above) + sum(ties) <= self.k * (1 + self.tolerance):
            return passing, [a + t for a, t in zip(above, ties, strict=True)]
        # More equal magnitudes at the threshold than there is room for: cut them by rank and index.
        room, starts = self.k - sum(above), accumulate(ties, initial=0)
        quotas = [max(0, min(t, room - s)) for t, s in zip(ties, starts, strict=False)]
        tied = magnitude_keys(passing.values) == key
        chosen = passing.where(~tied | (tied.cumsum(0) <= quotas[self.transport.rank]))
        return chosen, [a + q for a, q in zip(above, quotas, strict=True)]

    def _balance(self, chosen: SparseStream, shares: Sequence[int], packer: Packer) -> SparseStream:
        """Move entries point to point until every rank holds an equal share, in the same order."""
        P, rank, spans = self.transport.world_size, self.transport.rank, self._spans()
        total = sum(shares)
        held = list(pairwise([0, *accumulate(shares)]))
        level = [(total * r // P, total * (r + 1) // P) for r in range(P)]

        def moved(source: int, target: int) -> range:
            """Positions in the whole sequence that go from one rank to another."""
            start = max(held[source][0], level[target][0])
            return range(start, max(start, min(held[source][1], level[target][1])))

        def part(target: int) -> SparseStream:
            places, first = moved(rank, target), held[rank][0]
            return chosen.slice(places.start - first, places.stop - first)

        parts: dict[int, SparseStream] = {rank: part(rank)}
        for batch in batches(P):
            handles = {}
            for s in batch:
                target, source = (rank + s) % P, (rank - s) % P
                sends, receives = part(target).nnz > 0, len(moved(source, rank)) > 0
                handles[source] = self.transport.exchange(
                    packer.pack(Part.of(part(target), *spans[rank]))[0] if sends else None,
                    target if sends else None,
                    source if receives else None,
                    channel="balance",
                )
            for source, handle in handles.items():
                message = handle.wait()
                if message is not None:
                    parts[source] = self._read(message, packer, spans[source])
        return SparseStream.concatenate([parts[r] for r in sorted(parts)], self.numel)

    # -- state -------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "global_threshold": self.global_threshold,
            "regions_are_uneven": self.regions_are_uneven,
            "boundaries": self.boundaries.clone(),
            "level_counts": self.level_counts.clone(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With another world size regions are drawn anew."""
        if len(state["boundaries"]) == self.transport.world_size - 1:
            super().load_state_dict(state)
            self.boundaries = state["boundaries"].clone()
            self.global_threshold = float(state["global_threshold"])
            self.regions_are_uneven = bool(state["regions_are_uneven"])
            if state["level_counts"].shape == self.level_counts.shape:
                self.level_counts = state["level_counts"].clone()
