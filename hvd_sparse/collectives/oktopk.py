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

Cost, at most: (2P + 2 log P) α + 6k (P-1)/P β (equation 3), for what a rank sends and for what it
receives, in every step; at least 2k (P-1)/P β (theorem 3.1). k stands for what a rank brings, where
that is more. Proof, with k' = k (P-1)/P: an owner receives at most 1.5 k' entries in phase 1
(`allowances`), or k (1 + 1/FINE) where regions were just drawn; a rank sends k. Gathering without
asking, a rank sends and receives 1.5 k'. Otherwise at most k are gathered: a rank that has all
sends each once (`level_moves`), and from five ranks on passes on k (1 - log P/(P-1)) of others.
Counters are not in it: 4 · 512 log P words where the threshold is evaluated, 2 · BINS log P in each
round in which regions are drawn (five were seen at P = 16), and from each rank `COUNT_BYTES`, and
`HEAD_BYTES` as often as entries are gathered.

Departures from the paper:
  * Regions cut the union of all ranks' entries, by a histogram. At the mean of the ranks'
    quantiles, one owner may get 2k (P-1) words where ranks' entries lie apart.
  * What a message has far beyond what regions were drawn for, its least entries, waits at its rank
    for the next step, which draws regions anew. A result may be short then.
  * Two ranks swap all they have, 2k words, and both select: two phases could take more than 3k.
  * The exact global threshold comes from counters, not from gathered values (global_threshold.py).
  * The paper reuses a global threshold as it is. Here messages of phase 1 also tell how many of a
    rank's entries pass each of some 70 levels around the last one. These counts, times the share
    that was left of such a count in the last step's sums, say where a few percent more than k will
    pass. Of a result that is above k (1 + tolerance), the k largest are applied; where one is below
    k (1 - tolerance), or too few are expected, the threshold is evaluated exactly in the same step,
    and what is missing is gathered. Ties at an exact threshold are cut by rank and index. So the
    result holds k within the tolerance.
  * The paper asks for the owners' shares in every step. Here the last step's tell them. A
    round of their own asks where these may be wrong or too uneven, and where the threshold is
    evaluated exactly. Not asked, an owner with far more than 1.5 k/P waits.
  * The paper makes shares equal where the largest exceeds four times the average. Here they are
    levelled where the bound asks for it, too, and who hands over much gathers less.
  * A lossy wire rounds values in both phases; whoever encodes takes the error back where the entry
    is in the result. The other entries go back whole to where they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.collectives.global_threshold import (
    LEVELS,
    count_that_passes,
    counts_at_levels,
    th_re_evaluate,
    threshold_passed_by,
)
from hvd_sparse.cost_model import Work
from hvd_sparse.magnitude import magnitude_keys, threshold_key
from hvd_sparse.streams import ENTRY_BYTES, Part, SparseStream, merge, sum_of, unapplied
from hvd_sparse.topology import allgather_loads, batches
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Packer, Wire
from hvd_sparse.wire.messages import check_bytes

AIM_SHARE = 0.03
"""How far above k a threshold is aimed, as a share of k: what is too much is dropped after it was
gathered, what is missing costs more rounds."""
AIM_DEVIATIONS = 2.0
"""The same in square roots of k, by which a count differs from what is expected by chance."""
HALF_BOUND, LITTLE_MORE = 1.5, 1.25
"""Times k (P-1)/P entries, of two words, that a rank may receive in each phase; and times its part
of them, which an owner sends of the result, that it may have without waiting for the others."""
FEW_ENTRIES = 64
"""A message with so many is as quick as one with fewer: they are neither levelled nor held back."""
BINS = 512
"""Bins of the histogram, where 64 for each region are not more."""
FINE = 32
"""A bin in which regions meet is cut further where it holds more than this part of a region."""
MANY = 32
"""Regions are drawn anew where more than this part of all entries was held back."""
COUNT_BYTES, HEAD_BYTES = 4 * LEVELS, 4 * 4
"""What comes before the entries of a region: counts at all levels; and before those that are
gathered: four numbers of a step."""

Span = tuple[int, int]
"""Elements from the first of these up to the second."""


Gathered = tuple[SparseStream, list[int], int]
"""Entries of all ranks, how many came from each, and how many are left at their owners."""


class OkTopk(Collective):
    """The O(k) sparse allreduce.

    Args:
        k: See `Collective`; the result holds about k entries too.
        repartition_interval: τ, steps from one repartition to the next, at least 1.
        threshold_interval: τ′, steps from one exact global threshold to the next, at least 1.
        balance_factor: Shares are levelled where the largest exceeds this many times the average,
            or where a rank would send more than its bound.
        tolerance: How far the result's nnz may be from k, as a share of k.

    Attributes:
        global_threshold: What entries passed in the last step; infinite before the first one.
        boundaries: Where regions end, but for the last, int64 `(P-1,)`.
        allowances: Entries that this rank may send to each owner, int64 `(P,)`.
        regions_are_uneven: Whether ranks had more for some owners.
        shares: How many reduced entries of each rank passed the threshold, int32 `(P,)`; zeros
            where that is not known.
        left: How many passed, over how many of the ranks' entries did before they were summed; 0
            where that is not known.
    """

    kept = (
        *("step", "k", "global_threshold", "regions_are_uneven"),
        *("boundaries", "allowances", "shares", "left"),
    )

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
        self.global_threshold = inf
        self.boundaries = torch.zeros(transport.world_size - 1, dtype=torch.int64, device="cpu")
        self.allowances = torch.full(
            (transport.world_size,), numel, dtype=torch.int64, device="cpu"
        )
        self.regions_are_uneven = False
        self.shares = torch.zeros(transport.world_size, dtype=torch.int32, device="cpu")
        self.left = 0.0
        self._counts: Any = None
        self._received = self._held = self._passing = 0
        self._all_received: list[int] = []

    @override
    def aim(self, k: int) -> None:
        if k < self.k:  # what an owner may get is less, too
            self.allowances = (self.allowances * k // self.k).clamp(min=FEW_ENTRIES)
        super().aim(k)

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """Algorithm 1, from line 5 on; see `Collective.reduce`."""
        packer = self.packer(stream)
        if self.transport.world_size == 2:
            return self._swap(stream, packer)
        redraws = self.step % self.repartition_interval == 0 or self.regions_are_uneven
        sent = self._allowed(stream)
        self._held = stream.nnz - sent.nnz  # also where regions are drawn: entries may move on
        if redraws:
            self.boundaries, brought = space_repartition(stream, self.transport)
            sent = stream
        reduced_topk, last = self.split_and_reduce(sent, packer), self.global_threshold
        due = self.step % self.threshold_interval == 0
        u = self.balance_and_allgather(reduced_topk, packer, re_evaluate=due, asks=redraws)
        passed = count_that_passes(self.global_threshold, self._counts, last)
        self.left = float(self.shares.sum()) / passed if passed else 0.0
        if redraws:
            self.allowances = self._allow(stream, brought)
        self.step += 1
        self.transport.worked(Work(selected_entries=reduced_topk.nnz + stream.nnz))
        returned = unapplied(sent, [packer.lost(self.numel)], u)
        if sent.nnz < stream.nnz:
            held = stream.without(sent.indices).to(packer.device)
            returned = sum_of([returned, held], self.numel)
        return Reduction(u, returned)

    def _swap(self, stream: SparseStream, packer: Packer) -> Reduction:
        """Between two ranks: each sends all it has, and selects from the sum."""
        rank = self.transport.rank
        payload, own = packer.pack(Part.of(stream))
        handle = self.transport.exchange(payload, 1 - rank, 1 - rank, channel="split")
        both = [packer.land(own).to_stream(self.numel)]
        both.insert(1 - rank, self._read(handle.received(), packer, (0, self.numel)))
        u = self._sum(both[0], both[1:]).largest(self.k)
        self.step += 1
        self.transport.worked(Work(selected_entries=2 * stream.nnz))
        return Reduction(u, unapplied(stream, [packer.lost(self.numel)], u))

    # -- phase 1: split and reduce (section 3.1.1) -------------------------------------------------

    def _allow(self, stream: SparseStream, brought: int) -> Tensor:
        """What this rank may send each owner, while regions stay: as much as now, and some more."""
        others = self.transport.world_size - 1
        most = int(HALF_BOUND * max(self.k, brought / (others + 1)) * others / (others + 1))
        most -= others * (COUNT_BYTES + HEAD_BYTES) // ENTRY_BYTES  # which come with the entries
        now = torch.tensor(self._cuts(stream), dtype=torch.int64, device="cpu").diff()
        received = torch.tensor(self._all_received, dtype=torch.int64, device="cpu")
        spare = (most - received).clamp(min=0) // max(1, others)
        return (now + spare).clamp(min=FEW_ENTRIES)

    def _allowed(self, stream: SparseStream) -> SparseStream:
        """What of a stream may be sent: of each region the largest; of this rank's own, all."""
        most: list[int] = self.allowances.tolist()
        most[self.transport.rank] = self.numel
        pieces = [stream.slice(*ends) for ends in pairwise(self._cuts(stream))]
        kept = [each.largest(count) for each, count in zip(pieces, most, strict=True)]
        is_all = sum(each.nnz for each in kept) == stream.nnz
        return stream if is_all else SparseStream.concatenate(kept, self.numel)

    def split_and_reduce(self, stream: SparseStream, packer: Packer) -> SparseStream:
        """Send each region's entries to its owner; sum those that come for this rank's own region.

        At step s rank r sends to r + s and receives from r - s, so that no owner is everybody's
        destination at once; while a batch of messages is under way, the batch before is summed.
        """
        P, rank = self.transport.world_size, self.transport.rank
        regions, span = self._cut(stream), self._spans()[rank]
        counts = counts_at_levels(stream.values, self.global_threshold)
        total, arrived = packer.land(regions[rank]).to_stream(self.numel), list[SparseStream]()
        self._received, heads = 0, list[Tensor]()
        for batch in batches(P):
            handles = []
            for dst, src in (((rank + s) % P, (rank - s) % P) for s in batch):
                payload, _ = packer.pack(regions[dst])
                handle = self.transport.exchange((counts, *payload), dst, src, channel="split")
                handles.append(handle)
            total = self._sum(total, arrived)
            messages = [handle.received() for handle in handles]
            heads += [self._head(message, "counts at levels", COUNT_BYTES) for message in messages]
            arrived = [self._read(message[COUNT_BYTES:], packer, span) for message in messages]
            self._received += sum(part.nnz for part in arrived)
        self._counts = torch.stack([counts, *heads]).sum(0).numpy()
        return self._sum(total, arrived)

    def _head(self, message: Tensor, what: str, nbytes: int) -> Tensor:
        check_bytes(self.wire.name, what, message[:nbytes], nbytes)
        return message[:nbytes].view(torch.int32)

    def _spans(self) -> list[Span]:
        return list(pairwise([0, *self.boundaries.tolist(), self.numel]))

    def _cuts(self, stream: SparseStream) -> list[int]:
        """Positions between which the entries of each rank's region lie."""
        ends = self.boundaries.to(torch.int32).numpy()
        return [0, *stream.indices.numpy().searchsorted(ends).tolist(), stream.nnz]

    def _cut(self, stream: SparseStream) -> list[Part]:
        """The stream's entries in every rank's region."""
        stretches = pairwise(self._cuts(stream))
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
        self, reduced_topk: SparseStream, packer: Packer, *, re_evaluate: bool, asks: bool
    ) -> SparseStream:
        """Take the global top k out of the reduced regions and bring it to every rank."""
        k, rank, P = self.k, self.transport.rank, self.transport.world_size
        most = max(FEW_ENTRIES, int(HALF_BOUND * k / P))
        shares = None if re_evaluate else self._follow_threshold()
        all_pass = self.global_threshold == 0.0  # then sums that cancelled out do, too
        chosen = reduced_topk if all_pass else reduced_topk.reaching(self.global_threshold)
        self._passing = chosen.nnz
        if shares is None or asks or max(shares) > most:
            if shares is not None:
                shares = self.gather_counts(chosen.nnz)[0]
            if shares is None or not self._is_near(sum(shares)):
                chosen, shares = self._select_exactly(reduced_topk, k)
            shares = [-(-share * k // max(1, k, sum(shares))) for share in shares]
            chosen = chosen.largest(shares[rank])
            u = self._level_and_gather(chosen, shares, [0] * P, reduced_topk, packer)[0]
        else:
            is_over = chosen.nnz > LITTLE_MORE * most
            sent = chosen.largest(1 if is_over else most)  # one, as what is not finite has to go
            u, counts, unsent = self._gather(sent, self._spans(), reduced_topk, packer)
            if unsent and u.nnz < (1 - self.tolerance) * k:
                has_sent_its_part = sent.nnz < chosen.nnz and not is_over
                rest = reduced_topk.slice(0, 0 if has_sent_its_part else reduced_topk.nnz)
                exact = self._select_exactly(rest.without(sent.indices), k - u.nnz)
                self._passing += sent.nnz
                more = self._level_and_gather(*exact, counts, reduced_topk, packer)[0]
                u = sum_of([u, more], self.numel)
        return u if u.nnz <= (1 + self.tolerance) * k else u.largest(k)

    def _follow_threshold(self) -> list[int] | None:
        """Move the threshold to where a little more than k entries are expected to pass.

        Returns how many each rank is expected to have, or None where they are too far from k.
        """
        total = int(self.shares.sum())
        if self.global_threshold == inf or not total:
            return None
        left = self.left or total / max(1, self._counts[LEVELS // 2])  # as many as in the last step
        counts = self._counts * left
        found = threshold_passed_by(self._aimed(), counts, self.global_threshold)
        self.global_threshold, expected = found
        shares = [int(share * expected / total) for share in self.shares.tolist()]
        return shares if self._is_near(expected) else None

    def _aimed(self) -> float:
        """How many entries to aim at, so that hardly ever fewer than k come."""
        return self.k + max(AIM_SHARE * self.k, AIM_DEVIATIONS * sqrt(self.k))

    def _is_near(self, total: float) -> bool:
        """Whether so many entries may be gathered, to apply k of them, or all where all pass."""
        is_enough = total >= (1 - self.tolerance) * self.k or self.global_threshold == 0.0
        return is_enough and total <= self._aimed() + self.tolerance * self.k

    def _level_and_gather(
        self,
        chosen: SparseStream,
        shares: Sequence[int],
        before: Sequence[int],
        reduced_topk: SparseStream,
        packer: Packer,
    ) -> Gathered:
        """Bring what the ranks have chosen to every rank, which have sent some entries before."""
        spans, total = self._spans(), sum(shares) + sum(before)
        P, held = len(spans), [s + b for s, b in zip(shares, before, strict=True)]
        is_over = max(allgather_loads(held)) > self.k * (2 - 3 / P)  # of phase 2, where 1 took k
        if P > 1 and (is_over or max(held) > self.balance_factor * total / P):
            chosen = self._balance(chosen, level_moves(shares, before), packer)
            spans = [(0, self.numel)] * P  # entries have left their owners' regions
        return self._gather(chosen, spans, reduced_topk, packer)

    def _gather(
        self,
        chosen: SparseStream,
        spans: Sequence[Span],
        reduced_topk: SparseStream,
        packer: Packer,
    ) -> Gathered:
        """Bring entries to every rank, and with them what the next step needs to know."""
        rank = self.transport.rank
        unsent = max(0, reduced_topk.nnz - chosen.nnz)
        facts = [self._passing, self._received, self._held, unsent]
        head = torch.tensor(facts, dtype=torch.int32, device="cpu")
        payload, own = packer.pack(Part.of(chosen, *spans[rank]))
        messages = self.transport.allgather((head, *payload), channel="allgather")
        heads = torch.stack([self._head(m, "numbers of a step", HEAD_BYTES) for m in messages])
        self.shares = heads[:, 0].clone()
        self._all_received, held, left = heads[:, 1:].T.tolist()
        self.regions_are_uneven = sum(held) > max(FEW_ENTRIES, self.k * len(held) / MANY)
        bodies = (m[HEAD_BYTES:] for m in messages)
        parts = [part.to_stream(self.numel) for part in packer.read_all(bodies, own, spans)]
        is_apart = spans[0][1] < self.numel or len(spans) == 1
        u = SparseStream.concatenate(parts, self.numel) if is_apart else sum_of(parts, self.numel)
        return u, [part.nnz for part in parts], sum(left)

    def _select_exactly(
        self, reduced_topk: SparseStream, wanted: int
    ) -> tuple[SparseStream, list[int]]:
        """Evaluate the threshold anew; this rank's part of so many, and every rank's share."""
        if self.k == self.numel:
            self.global_threshold = 0.0  # density 1: no threshold may leave anything behind
        else:
            self.global_threshold = th_re_evaluate(reduced_topk.values, wanted, self.transport)
        # With room for all, sums that cancelled out pass too.
        key = threshold_key(self.global_threshold) if self.global_threshold > 0.0 else 0
        keys = magnitude_keys(reduced_topk.values)
        above, ties = self.gather_counts(int((keys > key).sum()), int((keys == key).sum()))
        passing = reduced_topk.where(keys >= key)
        self._passing = passing.nnz
        if sum(above) + sum(ties) <= wanted:
            return passing, [a + t for a, t in zip(above, ties, strict=True)]
        # More equal magnitudes at the threshold than there is room for: cut them by rank and index.
        room, starts = wanted - sum(above), accumulate(ties, initial=0)
        quotas = [max(0, min(t, room - s)) for t, s in zip(ties, starts, strict=False)]
        tied = magnitude_keys(passing.values) == key
        chosen = passing.where(~tied | (tied.cumsum(0) <= quotas[self.transport.rank]))
        return chosen, [a + q for a, q in zip(above, quotas, strict=True)]

    def _balance(
        self, chosen: SparseStream, moves: Mapping[tuple[int, int], int], packer: Packer
    ) -> SparseStream:
        """Move entries point to point; what this rank holds then."""
        P, rank, spans = self.transport.world_size, self.transport.rank, self._spans()
        first = chosen.nnz
        mine: dict[int, SparseStream] = {}
        for (source, target), count in moves.items():
            if source == rank:
                last, first = first, max(0, first - count)  # `largest` may have left zeros out
                mine[target] = chosen.slice(first, last)
        parts = [chosen.slice(0, first)]
        for batch in batches(P):
            handles = {}
            for s in batch:
                target, source = (rank + s) % P, (rank - s) % P
                part, comes = mine.get(target), (source, rank) in moves
                handles[source] = self.transport.exchange(
                    None if part is None else packer.pack(Part.of(part, *spans[rank]))[0],
                    None if part is None else target,
                    source if comes else None,
                    channel="balance",
                )
            for source, handle in handles.items():
                message = handle.wait()
                if message is not None:
                    parts.append(self._read(message, packer, spans[source]))
        return sum_of(parts, self.numel)

    # -- state -------------------------------------------------------------------------------------

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With another world size regions are drawn anew."""
        P = self.transport.world_size
        if len(state["boundaries"]) + 1 == len(state["allowances"]) == len(state["shares"]) == P:
            super().load_state_dict(state)

    @override
    def common(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, "allowances": None}  # by what this rank brought


def space_repartition(stream: SparseStream, transport: Transport) -> tuple[Tensor, int]:
    """Boundaries of P equal parts of all ranks' entries, by a histogram; how many these are."""
    P, numel = transport.world_size, stream.numel
    bins = max(BINS, 2 * FINE * P)
    parts = torch.arange(1, P, dtype=torch.int64, device="cpu")
    edges = (torch.arange(bins + 1, dtype=torch.int64, device="cpu") * numel // bins).unique()
    while True:
        places = torch.searchsorted(stream.indices, edges.int())
        counts = transport.allreduce_sum(places.diff(), channel="boundaries")
        ends = counts.cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        if total == 0:
            return parts * numel // P, total
        wanted = total * parts // P
        at = torch.searchsorted(ends, wanted)
        met, widths = at.unique(), edges.diff()
        steep = met[(counts[met] * P * FINE > total) & (widths[met] > 1)]
        if steep.numel() == 0:
            is_upper = ends[at] - wanted <= wanted - (ends - counts)[at]
            return edges[at + is_upper], total
        each = -(-bins // steep.numel())
        shares = torch.arange(each, dtype=torch.int64, device="cpu") * widths[steep, None] // each
        finer = (edges[steep, None] + shares).view(-1)
        edges = torch.cat([edges[met], edges[met + 1], finer, edges[[0, -1]]]).unique()


def level_moves(shares: Sequence[int], before: Sequence[int]) -> dict[tuple[int, int], int]:
    """Entries to move from rank to rank, so that none sends more in all than the ranks' total.

    Who has more than a (P-1)-th of all hands entries over, and can gather less for that: with all
    of them it sends each once, and the others do the rest. Of P > 2 ranks, `shares` are the
    entries, and `before` is what each has sent to every other one already.
    """
    P, total = len(shares), sum(shares) + sum(before)
    most = -(-total // (P - 1))
    both = list(zip(shares, before, strict=True))
    rooms = [(most if s + b <= most else -((s + b - total) // (P - 2))) - b for s, b in both]
    free = [max(0, room) - share for room, share in zip(rooms, shares, strict=True)]
    moves, target = {}, 0
    for source, over in enumerate(free):
        while over < 0:
            while free[target] <= 0:
                target += 1
            moves[source, target] = count = min(-over, free[target])
            free[target] -= count
            over += count
    return moves
