"""TopkA: gather every rank's stream everywhere, then sum.

Source: the allgather-based baseline of Li and Hoefler (PPoPP '22), section 2 and Table 1; also
SparCML's "sparse allgather".

Symbols: P ranks, k entries per rank, α latency, β time per word.

Steps: an allgather of the streams; each rank sums all P of them in rank order.

Cost: α log P + 2k(P-1) β. It has no fill-in on the wire and the lowest latency; its volume grows
with P, so it is for two or three ranks, or for small k.

Where the transport connects devices, streams and their sum stay on them, with the wire's plain
form. The merge and its order, and so the bits, are the host's.

Departure: on devices a message has a fixed room. It holds what selectors take that hold to k, and
follows the others. The step in which a stream outgrows it returns the smallest entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.cost_model import Work
from hvd_sparse.errors import MessageError
from hvd_sparse.streams import Part, SparseStream, merge
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

HEADER_WORDS = 2
HEADER_BYTES = 4 * HEADER_WORDS
SLACK_PARTS = 8
"""An eighth more than what is expected: selectors that hold to k miss it by a tenth at most."""
SLACK_ENTRIES = 64
"""So many more: a message is as quick with them, and a few entries vary more."""


class TopkAllgather(Collective):
    """TopkA. What goes in is applied, and what rounding loses is returned.

    On devices every rank sends one message of the same size: a header, then room for as many
    indices, then for as many values. The header has the number of entries sent, and how many there
    were to send.

    NCCL's messages have no sizes, and asking for counts would be a round of its own, for which the
    host waits. So the room follows from what all ranks know: k, and the longest stream of the last
    exchange, which its headers tell. The room is that of the larger of the two, with some slack.
    Where a stream is longer still, its largest entries are sent, ties to the lower index. The
    others are returned, and the next step has room for them. Error feedback loses least by that, no
    part of the vector is starved, and what is not finite is always among the largest: if it came
    back, no other rank would learn that the step does not count.

    Attributes:
        longest: Entries of the longest stream in the last exchange between devices, whether they
            were sent or not; 0: there was none. The same on all ranks.
    """

    kept = ("step", "longest")

    def __init__(self, transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self.longest = 0
        self._memory: Tensor | None = None

    @override
    def reads_on(self, device: torch.device) -> bool:
        ours = self.transport.device if self.wire is PLAIN else None
        return ours == device

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        if self.reads_on(stream.indices.device):
            return self._reduce_on_devices(stream)
        packer = self.packer(stream)
        payload, own = packer.pack(Part.of(stream))
        messages = self.transport.allgather(payload, channel="topk_allgather")
        self.step += 1
        parts = packer.read_all(messages, own, [(0, self.numel)] * len(messages))
        streams = [part.to_stream(self.numel) for part in parts]
        self.transport.worked(Work(sum(part.nnz for part in streams)))
        return Reduction(merge(streams, self.numel), packer.lost(self.numel))

    def _reduce_on_devices(self, stream: SparseStream) -> Reduction:
        """Brings the ranks' entries to all of them, and waits once."""
        room = room_for(max(self.k, self.longest), self.numel)
        sent, rest = stream.split_largest(room)
        message = self._message(sent, stream.nnz, room).view(torch.uint8)
        arrived, headers = self.transport.allgather_on_devices(message, HEADER_BYTES)
        counts, lengths = headers.view(torch.int32).t().tolist()
        for rank, count in enumerate(counts):
            if not 0 <= count <= room:
                raise MessageError(f"rank {rank} claims {count} entries, with room for {room}")
        self.longest = max(0, *lengths)
        self.step += 1
        entries = arrived.view(torch.int32)[:, HEADER_WORDS:].view(len(counts), 2, room)
        parts = [
            SparseStream(indices[:count], values[:count].view(torch.float32), self.numel)
            for (indices, values), count in zip(entries, counts, strict=True)
        ]
        if sum(counts) == 0:
            return Reduction(SparseStream.empty(self.numel), rest)
        self.transport.worked(Work(sum(counts)))
        return Reduction(merge(parts, self.numel), rest)

    def _message(self, sent: SparseStream, length: int, room: int) -> Tensor:
        """In memory that is kept: an exchange that is through needs it no more."""
        words = HEADER_WORDS + 2 * room
        if self._memory is None or self._memory.numel() < words:
            self._memory = torch.empty(words, dtype=torch.int32, device=sent.indices.device)
        message = self._memory[:words]
        message[0].fill_(sent.nnz)
        message[1].fill_(length)
        indices, values = message[HEADER_WORDS:].view(2, room)
        indices[: sent.nnz] = sent.indices
        values[: sent.nnz] = sent.values.view(torch.int32)
        return message


def room_for(entries: int, numel: int) -> int:
    """Entries that a message has room for where so many are expected; never more than n."""
    return min(numel, entries + entries // SLACK_PARTS + SLACK_ENTRIES)
