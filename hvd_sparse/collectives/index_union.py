"""The sum of all ranks' accumulators at the union of their selected indices.

Source: Yoon and Oh, "ExDyna" (CCGrid 2024), algorithm 1, lines 11-13 and 18; CLT-k (Chen et al.,
"ScaleCom", NeurIPS 2020) exchanges in the same way.

Symbols: P ranks, K indices in the union, α latency, β time per word.

Steps:
  1. gather the ranks' indices everywhere, in the wire's form;
  2. take this rank's accumulator at all of them, whoever selected them;
  3. sum these values: slices go to their owners, who add them in the order of the ranks, and the
     sums are gathered everywhere.

Cost: (log P + 2 (P-1)) α + (K + 2K) (P-1)/P β. Where selections do not overlap, nothing builds up:
K is what the ranks selected together.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hvd_sparse.collectives.base import Collective, Reduction, TakeAt
from hvd_sparse.streams import Part, SparseStream


class IndexUnion(Collective):
    """Sums accumulators at the union of the streams' indices."""

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """See `Collective.reduce`."""
        own_indices = self.wire.encode_indices(stream.indices, self.numel)
        messages = self.transport.allgather(own_indices, channel="indices")
        gathered = [self.wire.decode_indices(message, self.numel) for message in messages]
        union = torch.cat(gathered).unique()
        values = torch.zeros(union.numel())
        own = torch.zeros(union.numel(), dtype=torch.bool)
        own[torch.searchsorted(union, stream.indices)] = True
        values[own] = stream.values
        if take_at is not None:
            values[~own] = take_at(union[~own])
        total, lost = self._sum(values)
        self.step += 1
        returned = SparseStream(union[lost.indices.long()], lost.values, self.numel)
        return Reduction(SparseStream(union, total, self.numel), returned)

    def _sum(self, values: Tensor) -> tuple[Tensor, SparseStream]:
        """Float32 values `(K,)` summed over the ranks, in their order; what rounding lost here."""
        P, rank, packer = self.transport.world_size, self.transport.rank, self.packer()
        edges = [values.numel() * r // P for r in range(P + 1)]
        slices = [Part(None, values[a:b], a, b) for a, b in pairwise(edges)]
        payloads = [() if r == rank else packer.pack(part)[0] for r, part in enumerate(slices)]
        arrived = self.transport.all_to_all(payloads, channel="values")
        total = torch.zeros(edges[rank + 1] - edges[rank])
        for r, message in enumerate(arrived):
            theirs = slices[rank] if r == rank else packer.unpack(message, *edges[rank : rank + 2])
            total += theirs.values
        payload, _ = packer.pack(Part(None, total, *edges[rank : rank + 2]))
        gathered = self.transport.allgather(payload, channel="sums")
        sums = [
            packer.unpack(m, a, b).values
            for m, (a, b) in zip(gathered, pairwise(edges), strict=True)
        ]
        return torch.cat(sums), packer.lost(values.numel())
