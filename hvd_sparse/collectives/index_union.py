"""The sum of all ranks' accumulators at the union of their selected indices.

Source: Yoon and Oh, "ExDyna" (CCGrid 2024), algorithm 1, lines 11-13 and 18. ExDyna itself
(exdyna.py) and CLT-k (below) exchange in this way.

Symbols: P ranks, K indices in the union, α latency, β time per word.

Steps:
  1. gather the ranks' indices everywhere, in the wire's form;
  2. take this rank's accumulator at all of them, whoever selected them;
  3. sum these values: slices go to their owners, who add them in the order of the ranks, and the
     sums are gathered everywhere.

Cost: (2 log P + P - 1) α + (K + 2K) (P-1)/P β. Where selections do not overlap, nothing builds up:
K is what the ranks selected together. The words are the ranks' mean: who selects nothing receives K
+ 2K (P-1)/P.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.accumulator import Scope
from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.streams import CPU, Part, SparseStream
from hvd_sparse.wire import Packer


class IndexUnion(Collective):
    """Sums accumulators at the union of the streams' indices."""

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        parts = self.gather(stream.indices)
        return self.sum_at(stream, parts, take_at, self.packer(stream))

    def gather(self, indices: Tensor) -> list[Tensor]:
        """Line 11: all ranks' indices, in the order of the ranks."""
        own = self.wire.encode_indices(indices, self.numel)
        messages = self.transport.allgather(own, channel="indices")
        return [self.wire.decode_indices(message, self.numel) for message in messages]

    def sum_at(
        self, stream: SparseStream, parts: list[Tensor], take_at: TakeAt | None, packer: Packer
    ) -> Reduction:
        """Lines 12-13 and 18: the sum of all ranks' accumulators wherever one selected.

        `parts` has all ranks' indices. Values are summed on the packer's device.
        """
        rank = self.transport.rank
        order = sorted(range(len(parts)), key=lambda r: int(parts[r][0]) if len(parts[r]) else -1)
        runs = [parts[r] for r in order if len(parts[r])]
        (union,) = ops.moved((torch.cat([parts[r] for r in order]),), packer.device)
        if all(before[-1] < after[0] for before, after in pairwise(runs)):
            # Partitions side by side, or a leader alone: as a rule.
            start = sum(len(parts[r]) for r in order[: order.index(rank)])
            values = self._values_around(stream, union, start, take_at)
        else:
            union = union.unique()
            values = self._values_among(stream, union, take_at)
        total, lost = self._sum(values, packer)
        self.step += 1
        returned = SparseStream.empty(self.numel)
        if lost.nnz:
            returned = SparseStream(union[lost.indices.long()], lost.values, self.numel)
        return Reduction(SparseStream(union, total, self.numel), returned)

    def _values_around(
        self, stream: SparseStream, union: Tensor, start: int, take_at: TakeAt | None
    ) -> Tensor:
        """Line 12: this rank's accumulator, where its own indices are a run of the union."""
        stop = start + stream.nnz
        values = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
        values[start:stop] = stream.to(union.device).values
        if take_at is not None:
            others = take_at(torch.cat([union[:start], union[stop:]]))
            values[:start], values[stop:] = others[:start], others[start:]
        return values

    def _values_among(self, stream: SparseStream, union: Tensor, take_at: TakeAt | None) -> Tensor:
        """The same where others selected some of this rank's indices, too, or some between them."""
        values = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
        own = torch.zeros(union.numel(), dtype=torch.bool, device=union.device)
        indices, its_values = stream.to(union.device).payload()
        places = torch.searchsorted(union, indices)
        own[places], values[places] = True, its_values
        if take_at is not None:
            others = own.logical_not().nonzero().view(-1)
            values[others] = take_at(union[others])
        return values

    def _sum(self, values: Tensor, packer: Packer) -> tuple[Tensor, SparseStream]:
        """Float32 values `(K,)` summed over the ranks, in their order; what rounding lost here."""
        P, rank, device = self.transport.world_size, self.transport.rank, values.device
        edges = [values.numel() * r // P for r in range(P + 1)]
        (values,) = ops.moved((values,), CPU)
        slices = [Part(None, values[a:b], a, b) for a, b in pairwise(edges)]
        payloads = [() if r == rank else packer.pack(part)[0] for r, part in enumerate(slices)]
        arrived = self.transport.all_to_all(payloads, channel="values")
        total = torch.zeros(edges[rank + 1] - edges[rank], dtype=torch.float32, device=device)
        for r, message in enumerate(arrived):
            mine = slices[rank]
            theirs = packer.land(mine) if r == rank else packer.read(message, mine.start, mine.stop)
            total += theirs.values
        payload, _ = packer.pack(Part(None, total, *edges[rank : rank + 2]))
        gathered = self.transport.allgather(payload, channel="sums")
        sums = [
            packer.read(m, a, b).values for m, (a, b) in zip(gathered, pairwise(edges), strict=True)
        ]
        return torch.cat(sums), packer.lost(values.numel())


class CyclicLeader(IndexUnion):
    """CLT-k: one rank in turn selects for all. Its scope is everything on the leader, else nothing.

    Source: Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for
    Communication-Efficient Distributed Training" (NeurIPS 2020), cyclic local top-k.

    Steps: at step t rank t mod P, the leader, selects its top k; every rank contributes its
    accumulator at the leader's indices, and these values are summed as above.

    Cost: that of the index union with K = k: the result has k entries, whatever P.

    Departure: the leader's indices travel by the allgather in which the others have nothing to
    send, not by a broadcast. So a rank with a non-finite gradient can say so when it does not lead.
    """

    @override
    def scope(self) -> Scope:
        if self.step % self.transport.world_size == self.transport.rank:
            return Scope(0, self.numel)
        return Scope(0, 0, share=0.0)
