"""TopkA: gather every rank's stream everywhere, then sum.

Source: the allgather-based baseline of Li and Hoefler (PPoPP '22), section 2 and Table 1; also
SparCML's "sparse allgather".

Symbols: P ranks, k entries per rank, α latency, β time per word.

Steps: an allgather of the streams; each rank sums all P of them in rank order.

Cost: α log P + 2k(P-1) β. It has no fill-in on the wire and the lowest latency; its volume grows
with P, so it is for two or three ranks, or for small k.

Where the transport connects devices, streams and their sum stay on them, with the wire's plain
form. The ranks gather their counts, then as many entries of each as the longest stream has. The
merge and its order, and so the bits, are the host's.
"""

from __future__ import annotations

import torch

from hvd_sparse import ops
from hvd_sparse.collectives.base import Collective, Reduction, TakeAt
from hvd_sparse.streams import Part, SparseStream
from hvd_sparse.wire import PLAIN
from hvd_sparse.work import Work


class TopkAllgather(Collective):
    """TopkA. Everything that goes in is applied; only what rounding loses is returned."""

    @property
    def device(self) -> torch.device | None:
        """See `Collective.device`."""
        return self.transport.device if self.wire is PLAIN else None

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """See `Collective.reduce`."""
        if self.device is not None and stream.indices.device.type == self.device.type:
            return self._reduce_on_devices(stream)
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

    def _reduce_on_devices(self, stream: SparseStream) -> Reduction:
        P, device = self.transport.world_size, stream.indices.device
        count = torch.full((1,), stream.nnz, dtype=torch.int32, device=device)
        gathered = self.transport.allgather_on_devices(count.view(torch.uint8))
        counts: list[int] = gathered.view(torch.int32).flatten().tolist()
        room, self.step = max(counts), self.step + 1
        nothing = SparseStream.empty(self.numel)
        if room == 0:
            return Reduction(nothing, nothing)
        sent = torch.zeros(2, room, dtype=torch.int32, device=device)
        sent[0, : stream.nnz] = stream.indices
        sent[1, : stream.nnz] = stream.values.view(torch.int32)
        arrived = self.transport.allgather_on_devices(sent.view(torch.uint8).flatten())
        entries = arrived.view(torch.int32).view(P, 2, room)
        parts = [
            (indices[:nnz], values[:nnz].view(torch.float32))
            for (indices, values), nnz in zip(entries, counts, strict=True)
        ]
        self.transport.worked(Work(sum(counts)))
        return Reduction(SparseStream(*ops.merge_sum(parts, self.numel), self.numel), nothing)
