"""TopkA: gather every rank's stream everywhere, then sum.

Source: the allgather-based baseline of Li and Hoefler (PPoPP '22), section 2 and Table 1; also
SparCML's "sparse allgather".

Symbols: P ranks, k entries per rank, α latency, β time per word.

Steps: an allgather of the streams; each rank sums all P of them in rank order.

Cost: α log P + 2k(P-1) β. It has no fill-in on the wire and the lowest latency; its volume grows
with P, so it is for two or three ranks, or for small k.

Where the transport connects devices, streams and their sum stay on them, with the wire's plain
form (device_allgather.py). The merge and its order, and so the bits, are the host's.

Departure: on devices a message has a fixed room. It holds what selectors take that hold to k, and
follows the others. The step in which a stream outgrows it returns the smallest entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_sparse import ops
from hvd_sparse.collectives.base import Collective, Reduction, TakeAt
from hvd_sparse.collectives.device_allgather import DeviceAllgather
from hvd_sparse.streams import Part, SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire
from hvd_sparse.work import Work


class TopkAllgather(Collective):
    """TopkA. What goes in is applied, and what rounding loses is returned.

    On devices, entries that a message has no room for are returned, too.
    """

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self._on_devices = DeviceAllgather(transport, numel)

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
        parts, rest = self._on_devices.gather(stream, self.k)
        self.step += 1
        entries = sum(indices.numel() for indices, _ in parts)
        if entries == 0:
            return Reduction(SparseStream.empty(self.numel), rest)
        self.transport.worked(Work(entries))
        return Reduction(SparseStream(*ops.merge_sum(parts, self.numel), self.numel), rest)

    def state_dict(self) -> dict[str, Any]:
        """See `Collective.state_dict`; on devices, the longest stream decides what is sent next."""
        return {**super().state_dict(), "longest": self._on_devices.longest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collective.load_state_dict`."""
        super().load_state_dict(state)
        self._on_devices.longest = int(state.get("longest", 0))
