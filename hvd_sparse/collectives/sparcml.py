"""What SparCML's algorithms have in common.

Source: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning"
(SC '19), section 5. The algorithms themselves are in ssar_recursive_double.py,
ssar_split_allgather.py and dsar_split_allgather.py.

Symbols there: P ranks, N elements, k entries per rank, K entries in the result, δ the entries at
which the dense form takes no more room, α latency, β_s time per entry, β_d per dense word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from hvd_sparse.collectives.base import Collective, Reduction, TakeAt
from hvd_sparse.streams import (
    SUM,
    DenseSum,
    Operation,
    Part,
    SparseStream,
    combine,
    sum_of_parts,
    uniform_regions,
)
from hvd_sparse.transports import Transport
from hvd_sparse.wire import Packer
from hvd_sparse.work import Work

PartsAllreduce = Callable[[Part, Transport, Packer, Operation], list[Part]]
"""Combines the ranks' parts, each of the whole vector, to adjacent parts that cover it; every rank
gets the same bits."""


class SparcmlCollective(Collective):
    """A sum by one of SparCML's algorithms. What goes in is applied; rounding errors return.

    Attributes:
        combine_parts: The algorithm, on the ranks' parts of one vector, by any operation.
    """

    combine_parts: ClassVar[staticmethod[[Part, Transport, Packer, Operation], list[Part]]]

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """See `Collective.reduce`."""
        packer = self.packer()
        parts = self.combine_parts(Part.of(stream), self.transport, packer, SUM)
        self.step += 1
        total = sum_of_parts(parts, self.numel)
        if isinstance(total, DenseSum):
            self.transport.worked(Work(scanned_values=self.numel))
        return Reduction(total, packer.lost(self.numel))


def combine_on(transport: Transport, parts: Sequence[Part], operation: Operation) -> Part:
    """Combine parts of the same stretch, in their order; the transport is told of the work."""
    total = combine(parts, operation)
    entries = sum(part.nnz for part in parts if part.indices is not None)
    if total.indices is not None:
        transport.worked(Work(entries))
    else:
        dense = sum(part.indices is None for part in parts)
        transport.worked(Work(0, entries, total.numel * max(1, dense)))
    return total


def split_and_reduce(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> Part:
    """The split phase (section 5.3.2): rank i gets region i of all ranks, and combines them.

    All regions are of N/P elements, give or take one. They are combined in the order of the ranks,
    whatever the operation.
    """
    P, rank = transport.world_size, transport.rank
    regions = [
        packer.settled(part.slice(start, stop), operation)
        for start, stop in uniform_regions(part.numel, P)
    ]
    payloads = [() if i == rank else packer.pack(region)[0] for i, region in enumerate(regions)]
    own = regions[rank]
    messages = transport.all_to_all(payloads, channel="sparcml.split")
    parts = [
        own if source == rank else packer.unpack(message, own.start, own.stop)
        for source, message in enumerate(messages)
    ]
    return combine_on(transport, parts, operation)


def allgather_regions(region: Part, numel: int, transport: Transport, packer: Packer) -> list[Part]:
    """The second phase: every rank's region, in order, as all ranks read them."""
    payload, own = packer.pack(region)
    messages = transport.allgather(payload, channel="sparcml.gather")
    spans = uniform_regions(numel, transport.world_size)
    return [
        own if source == transport.rank else packer.unpack(message, *span)
        for source, (message, span) in enumerate(zip(messages, spans, strict=True))
    ]
