"""SparDL: a reduce-scatter in log P rounds that selects again in each, for many ranks.

Source: Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse
Communication" (ICDE 2024): Spar-Reduce-Scatter, and the collection of residuals.

Symbols: P ranks, k entries per rank, α latency, β time per word. Rank i owns block i of P adjacent
ones; a block has S bins, in which entries are counted.

Steps:
  1. reduce and scatter, by Bruck's allgather in reverse: in the round of distance d, rank r sends
     its sums of blocks r + d, …, r + 2d - 1 to rank r + d, which adds them to its own. d is halved
     from the largest power of two below P on. Of a message of m blocks, the m k/P largest entries
     are sent; the others stay behind;
  2. gather the k/P largest of each block everywhere (Bruck);
  3. what stayed behind returns, and entries that are not in the result go back whole to the rank
     that brought them.

Cost, at most, in every step and for streams of any kind: 2 ⌈log P⌉ α + 4k (P-1)/P β. Ok-Topk needs
2P + 2 log P messages. What is applied is not the k largest of the sum: a block gives k/P.

Departures from the paper:
  * It cuts the vector into equal blocks, so that few entries are applied where they crowd. Here
    messages tell how many entries the ranks had in each bin, and before the next step blocks are
    cut so that all would have had as many. That takes some steps where entries jump.
  * It selects in every block of a message apart; here in a message as a whole.
  * Its rounds take other distances where P is no power of two; here they are Bruck's for any P.
    There are no teams (its parameter d is 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.cost_model import Work, spardl_bins
from hvd_sparse.streams import CPU, Part, SparseStream, merge, unapplied
from hvd_sparse.topology import bruck_rounds
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Packer, Wire
from hvd_sparse.wire.messages import check_bytes

COUNT_BYTES = 8
"""Of the number of entries that all ranks have in a bin."""
EVEN = 15
"""Weight of the entries when blocks are cut, where that of the elements is 1."""


class SparDL(Collective):
    """The sparse allreduce of SparDL: about k entries are applied.

    Attributes:
        edges: Where bins begin, and where the last one ends, int64 `(P S + 1,)`, ascending.
    """

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.bins = spardl_bins(transport.world_size)
        count = transport.world_size * self.bins
        self.edges = torch.arange(count + 1, device="cpu") * numel // count

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        P, rank = self.transport.world_size, self.transport.rank
        packer = self.packer(stream)
        counts = torch.searchsorted(stream.indices, self.edges.int()).diff().view(P, -1)
        held, dropped = stream.to(packer.device), list[SparseStream]()
        for distance, number in reversed(bruck_rounds(P)):
            target, source = (rank + distance) % P, (rank - distance) % P
            ours, rest = self._largest(self._within(held, target, number), number)
            payload, _ = packer.pack(Part.of(ours, *self._span(target, number)))
            head = counts.roll(-target, 0)[:number]
            handle = self.transport.exchange(
                (head, *payload), target, source, channel="spardl.scatter"
            )
            theirs, came = self._read(handle.received(), rank, number, packer)
            counts[(torch.arange(number, device="cpu") + rank) % P] += came
            both = [self._within(held, rank, distance), theirs]
            merged, selected = sum(each.nnz for each in both), ours.nnz + rest.nnz
            self.transport.worked(Work(merged, selected_entries=selected))
            held = merge(both, self.numel)
            dropped.append(rest)
        total, rest = self._largest(held, 1)
        payload, own = packer.pack(Part.of(total, *self._span(rank, 1)))
        messages = self.transport.allgather((counts[rank], *payload), channel="spardl.gather")
        read = [self._read(message, i, 1, packer) for i, message in enumerate(messages)]
        blocks = [part for part, _ in read]
        blocks[rank] = packer.land(own).to_stream(self.numel)
        u = SparseStream.concatenate(blocks, self.numel).largest(self.k)
        self.edges = self._cut(torch.cat([came for _, came in read]).view(-1).tolist())
        self.step += 1
        self.transport.worked(Work(selected_entries=held.nnz + stream.nnz))
        lost = [*dropped, rest, packer.lost(self.numel)]
        return Reduction(u, unapplied(stream, lost, u))

    def _largest(self, sums: SparseStream, blocks: int) -> tuple[SparseStream, SparseStream]:
        """What so many blocks may send, at least one entry (a non-finite one), and the rest."""
        return sums.split_largest(max(1, -(-self.k * blocks // self.transport.world_size)))

    def _span(self, first: int, number: int) -> tuple[int, int]:
        """Elements in which so many blocks from one on lie: all, where they go round."""
        if first + number > self.transport.world_size:
            return 0, self.numel
        start, stop = self.edges[[first * self.bins, (first + number) * self.bins]].tolist()
        return start, stop

    def _within(self, sums: SparseStream, first: int, number: int) -> SparseStream:
        """The entries in so many blocks from one on; after the last block comes the first."""
        P = self.transport.world_size
        (edges,) = ops.moved((self.edges[:: self.bins].int(),), sums.indices.device)
        (places,) = ops.moved((torch.searchsorted(sums.indices, edges),), CPU)
        cuts = places.tolist()
        over = first + number - P
        if over <= 0:
            return sums.slice(cuts[first], cuts[first + number])
        pieces = sums.slice(0, cuts[over]), sums.slice(cuts[first], sums.nnz)
        return SparseStream.concatenate(pieces, self.numel)

    def _read(
        self, message: Tensor, first: int, number: int, packer: Packer
    ) -> tuple[SparseStream, Tensor]:
        """Entries of so many blocks from one on, and their counts, int64 `(number, S)`."""
        cut = COUNT_BYTES * number * self.bins
        check_bytes(self.wire.name, "counts of blocks", message[:cut], cut)
        part = packer.read(message[cut:], *self._span(first, number))
        return part.to_stream(self.numel), message[:cut].view(torch.int64).view(number, -1)

    def _cut(self, counts: list[int]) -> Tensor:
        """Edges between which there would have been as many entries, if they were even in a bin.

        A part of the weight is that of the elements, so that no block becomes too wide.

        Args:
            counts: Entries of all ranks in each bin.
        """
        edges, total, P = self.edges.tolist(), sum(counts), self.transport.world_size
        weights = [
            EVEN * self.numel * count + total * (stop - start)
            for count, (start, stop) in zip(counts, pairwise(edges), strict=True)
        ]
        ends, places, at = [0, *accumulate(weights)], [0], 0  # whole numbers of any size
        for block in range(1, P):
            wanted = ends[-1] * block // P
            while ends[at + 1] < wanted:
                at += 1
            width = edges[at + 1] - edges[at]
            places.append(edges[at] + (wanted - ends[at]) * width // max(1, weights[at]))
        blocks = pairwise([*places, self.numel])
        finer = [a + (b - a) * i // self.bins for a, b in blocks for i in range(self.bins)]
        return torch.tensor([*finer, self.numel], device="cpu") if total else self.edges

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "edges": self.edges.clone()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With another world size blocks are cut anew."""
        if state["edges"].shape == self.edges.shape:
            super().load_state_dict(state)
            self.edges = state["edges"].clone()
