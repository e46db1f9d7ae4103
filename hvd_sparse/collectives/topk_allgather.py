"""TopkA: gather every rank's stream everywhere, then sum.

Source: the allgather-based baseline of Li and Hoefler (PPoPP '22), section 2 and Table 1; also
SparCML's "sparse allgather".

Symbols: P ranks, k entries per rank, α latency, β time per word.

Steps: an allgather of the streams; each rank sums all P of them in rank order.

Cost: α log P + 2k(P-1) β. It has no fill-in on the wire and the lowest latency; its volume grows
with P, so it is for two or three ranks, or for small k.
"""

from __future__ import annotations

from hvd_sparse import ops
from hvd_sparse.collectives.base import Collective, Reduction, TakeAt
from hvd_sparse.streams import Part, SparseStream
from hvd_sparse.work import Work


class TopkAllgather(Collective):
    """TopkA. Everything that goes in is applied; only what rounding loses is returned."""

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """See `Collective.reduce`."""
        packer = self.packer()
        payload, own = packer.pack(Part.of(stream))
        messages = self.transport.allgather(payload, channel="topk_allgather")
        self.step += 1
        streams = [
            own.to_stream(self.numel)
            if source == self.transport.rank
            else packer.unpack(message, 0, self.numel).to_stream(self.numel)
            for source, message in enumerate(messages)
        ]
        self.transport.worked(Work(sum(part.nnz for part in streams)))
        total = ops.merge_sum([part.payload() for part in streams], self.numel)
        return Reduction(SparseStream(*total, self.numel), packer.lost(self.numel))
