"""SparCML's three algorithms, which combine sparse parts until they fill up.

Source: Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning"
(SC '19), section 5.

Symbols: P ranks, N elements, k entries per rank, K entries in the result, α latency, β_s time per
entry, β_d per dense word.

Each algorithm is a function that combines the ranks' parts of one vector, by any operation; the
collective of the same name sums streams by it. A cost [a, b] is least where all indices overlap,
and most where none do, if they spread evenly over the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from typing_extensions import override

from hvd_sparse.collectives.collective import Collective, Reduction, TakeAt
from hvd_sparse.cost_model import Work
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
from hvd_sparse.topology import Cube
from hvd_sparse.transports import Transport
from hvd_sparse.wire import Packer, PlainWire

PartsAllreduce = Callable[[Part, Transport, Packer, Operation], list[Part]]
"""Combines the ranks' parts, each of the whole vector, to adjacent parts that cover it; every rank
gets the same bits. All ranks call it together; values are combined in the order of the ranks."""


class SparcmlCollective(Collective):
    """A sum by one of SparCML's algorithms. What goes in is applied; rounding errors return."""

    combine_parts: ClassVar[staticmethod[[Part, Transport, Packer, Operation], list[Part]]]

    @override
    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        packer = self.packer(stream)
        parts = self.combine_parts(Part.of(stream), self.transport, packer, SUM)
        self.step += 1
        total = sum_of_parts(parts, self.numel)
        if isinstance(total, DenseSum):
            self.transport.worked(Work(scanned_values=self.numel))
        return Reduction(total, packer.lost(self.numel))


# -- SSAR_Recursive_double (section 5.3.1, figure 2) -----------------------------------------------


def ssar_recursive_double(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> list[Part]:
    """Exchanges everything with a partner, log P times: for small data, where latency counts.

    Steps: in round t, ranks that are 2**(t-1) apart exchange all that they have and combine it.
    Where P is no power of two, the surplus ranks first hand theirs to a neighbour, and get the
    result from it.

    Cost: log P · α + [log P · k, (P-1) k] β_s.

    Departures from the paper: it leaves worlds that are no power of two to its supplement. With a
    lossy wire, both partners go on with what they have read of each other's and of their own part,
    so that all ranks keep the same bits. The first of the ranks that hold a part keeps its rounding
    error, and the result goes to the surplus ranks without rounding.
    """
    cube = Cube(transport.rank, transport.world_size)
    part = _fold(packer.settled(part, operation), cube, transport, packer, operation)
    for mask in cube.masks():
        peer = cube.peer(mask)
        if peer is None:
            transport.exchange(None, None, None, channel="sparcml.double").wait()
            continue
        first = cube.rank_at(cube.position & ~(mask - 1))  # of those that hold the same part
        payload, own = packer.pack(packer.settled(part, operation), author=first)
        message = transport.exchange(payload, peer, peer, channel="sparcml.double").received()
        theirs = packer.read(message, part.start, part.stop)
        own = packer.land(own)
        ordered = [own, theirs] if transport.rank < peer else [theirs, own]
        part = _combine_on(transport, ordered, operation)
    return [_unfold(packer.land(part), cube, transport, packer)]


def _fold(
    part: Part, cube: Cube, transport: Transport, packer: Packer, operation: Operation
) -> Part:
    """The surplus ranks hand theirs to a neighbour."""
    if cube.positions == transport.world_size:
        return part
    payload = packer.pack(part)[0] if cube.is_passive else None
    dst, src = (cube.partner, None) if cube.is_passive else (None, cube.partner)
    message = transport.exchange(payload, dst, src, channel="sparcml.fold").wait()
    if message is None:
        return part
    theirs = packer.read(message, part.start, part.stop)
    return _combine_on(transport, [packer.land(part), theirs], operation)


def _unfold(part: Part, cube: Cube, transport: Transport, packer: Packer) -> Part:
    """The surplus ranks get the result, without rounding."""
    if cube.positions == transport.world_size:
        return part
    wire = PlainWire(part.values.dtype, part.values.shape[1:])
    plain = Packer(wire, packer.rank, packer.step, packer.device)
    payload = None if cube.is_passive or cube.partner is None else plain.pack(part)[0]
    dst, src = (None, cube.partner) if cube.is_passive else (cube.partner, None)
    message = transport.exchange(payload, dst, src, channel="sparcml.unfold").wait()
    return part if message is None else plain.read(message, part.start, part.stop)


class SsarRecursiveDouble(SparcmlCollective):
    combine_parts = staticmethod(ssar_recursive_double)


# -- SSAR_Split_allgather (section 5.3.2) ----------------------------------------------------------


def ssar_split_allgather(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> list[Part]:
    """Reduces regions at their owners, then gathers them: for large data with a sparse result.

    Steps: every rank sends region i to rank i, which combines what comes; an allgather brings the
    results to all.

    Cost: (P-1 + log P) α + [2 (P-1)/P · k, P · k] β_s; the least needs indices that spread evenly.

    A region that fills up while it is summed is sent dense (section 5.1). So these are also the
    steps of TopkDSA, which Ok-Topk is compared with (Li and Hoefler, PPoPP '22, section 2 and
    Table 1, after SparCML). Its bound there is (P + 2 log P) α + [4k (P-1)/P, (2k + n) (P-1)/P] β.
    """
    region = _split_and_reduce(part, transport, packer, operation)
    settled = packer.settled(region, operation)
    return _allgather_regions(settled, part.numel, transport, packer)


class SsarSplitAllgather(SparcmlCollective):
    combine_parts = staticmethod(ssar_split_allgather)


# -- DSAR_Split_allgather (section 5.3.3) ----------------------------------------------------------


def dsar_split_allgather(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> list[Part]:
    """The same, but the owners send dense regions: for results that fill up.

    Cost: (P-1 + log P) α + [0, k] β_s + (P-1)/P · N β_d. A wire that quantises dense parts (QSGD,
    section 6) makes the second phase cheaper; the owner of a region keeps its error.
    """
    region = _split_and_reduce(part, transport, packer, operation)
    if region.indices is not None:
        transport.worked(Work(0, region.nnz, region.numel))
        region = region.to_dense(operation)
    return _allgather_regions(region, part.numel, transport, packer)


class DsarSplitAllgather(SparcmlCollective):
    combine_parts = staticmethod(dsar_split_allgather)


# -- phases ----------------------------------------------------------------------------------------


def _split_and_reduce(
    part: Part, transport: Transport, packer: Packer, operation: Operation
) -> Part:
    """Rank i gets region i of all ranks, N/P elements give or take one, and combines them."""
    P, rank = transport.world_size, transport.rank
    regions = [
        packer.settled(part.slice(start, stop), operation)
        for start, stop in uniform_regions(part.numel, P)
    ]
    payloads = [() if i == rank else packer.pack(region)[0] for i, region in enumerate(regions)]
    own = packer.land(regions[rank])
    messages = transport.all_to_all(payloads, channel="sparcml.split")
    parts = packer.read_all(messages, own, [(own.start, own.stop)] * P)
    return _combine_on(transport, parts, operation)


def _allgather_regions(
    region: Part, numel: int, transport: Transport, packer: Packer
) -> list[Part]:
    """Every rank's region, in order, as all ranks read them."""
    payload, own = packer.pack(region)
    messages = transport.allgather(payload, channel="sparcml.gather")
    return packer.read_all(messages, own, uniform_regions(numel, transport.world_size))


def _combine_on(transport: Transport, parts: Sequence[Part], operation: Operation) -> Part:
    """Combines parts of the same stretch, in their order; the transport is told of the work."""
    total = combine(parts, operation)
    entries = sum(part.nnz for part in parts if part.indices is not None)
    if total.indices is not None:
        transport.worked(Work(entries))
    else:
        dense = sum(part.indices is None for part in parts)
        transport.worked(Work(0, entries, total.numel * max(1, dense)))
    return total
