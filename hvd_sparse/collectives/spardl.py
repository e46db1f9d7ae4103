"""SparDL: a reduce-scatter in log P rounds that selects again in each, for many ranks.

Source: Zhao et al., "SparDL: Distributed Deep Learning Training with Efficient Sparse
Communication" (ICDE 2024): Spar-Reduce-Scatter, and the collection of residuals.

Symbols: P ranks, k entries per rank, α latency, β time per word. Rank i owns block i of P adjacent
ones.

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
  * It cuts the vector into equal blocks, so that few entries are applied where they crowd. Here all
    blocks have as many, as Ok-Topk's regions do; they are drawn anew every `INTERVAL` steps, and
    after a step with far fewer than k in its result.
  * It selects in every block of a message apart; here in a message as a whole.
  * Its rounds take other distances where P is no power of two; here they are Bruck's for any P.
    There are no teams (its parameter d is 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.collectives.oktopk import space_repartition
from hvd_sparse.cost_model import Work
from hvd_sparse.streams import CPU, Part, SparseStream, join, merge, unapplied
from hvd_sparse.topology import bruck_rounds
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

INTERVAL, LEAST_SHARE = 64, 0.9
"""Steps until blocks are drawn anew; what of k the result has where they are right."""


class SparDL(Collective):
    """The sparse allreduce of SparDL: about k entries are applied.

    Attributes:
        edges: Where blocks begin, and where the last one ends, int64 `(P + 1,)`, ascending.
        is_due: Whether the next step draws blocks.
    """

    kept = ("step", "edges", "is_due")

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.edges = torch.tensor(
            [0] * transport.world_size + [numel], dtype=torch.int64, device="cpu"
        )
        self.is_due = True

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        P, rank = self.transport.world_size, self.transport.rank
        packer = self.packer(stream)
        draws = self.is_due or self.step % INTERVAL == 0
        if draws:
            self.edges[1:-1] = space_repartition(stream, self.transport)[0]
        held, dropped = stream.to(packer.device), list[SparseStream]()
        for distance, number in reversed(bruck_rounds(P)):
            target, source = (rank + distance) % P, (rank - distance) % P
            ours, rest = self._largest(self._within(held, target, number), number)
            payload, _ = packer.pack(Part.of(ours, *self._span(target, number)))
            handle = self.transport.exchange(payload, target, source, channel="spardl.scatter")
            theirs = packer.read(handle.received(), *self._span(rank, number))
            both = [self._within(held, rank, distance), theirs.to_stream(self.numel)]
            merged, selected = sum(each.nnz for each in both), ours.nnz + rest.nnz
            self.transport.worked(Work(merged, selected_entries=selected))
            held = merge(both, self.numel)
            dropped.append(rest)
        total, rest = self._largest(held, 1)
        payload, own = packer.pack(Part.of(total, *self._span(rank, 1)))
        messages = self.transport.allgather(payload, channel="spardl.gather")
        blocks = packer.read_all(messages, own, [self._span(i, 1) for i in range(P)])
        u = join(blocks).to_stream(self.numel).largest(self.k)
        self.is_due = u.nnz < LEAST_SHARE * self.k and not draws
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
        return int(self.edges[first]), int(self.edges[first + number])

    def _within(self, sums: SparseStream, first: int, number: int) -> SparseStream:
        """The entries in so many blocks from one on; after the last block comes the first."""
        (edges,) = ops.moved((self.edges.int(),), sums.indices.device)
        (places,) = ops.moved((torch.searchsorted(sums.indices, edges),), CPU)
        cuts = places.tolist()
        over = first + number - self.transport.world_size
        if over <= 0:
            return sums.slice(cuts[first], cuts[first + number])
        pieces = sums.slice(0, cuts[over]), sums.slice(cuts[first], sums.nnz)
        return SparseStream.concatenate(pieces, self.numel)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With another world size blocks are drawn anew."""
        if state["edges"].shape == self.edges.shape:
            super().load_state_dict(state)
