"""SSAR_Recursive_double: exchange everything with a partner, log P times.

Source: SparCML (see sparcml.py), section 5.3.1 and figure 2.

Steps: in round t, ranks that are 2**(t-1) apart exchange all that they have and combine it. Where P
is no power of two, the surplus ranks first hand theirs to a neighbour, and get the result from it.

Cost: log P · α + [log P · k, (P-1) k] β_s: the least where all indices overlap, the most where none
do. It is for small data, where latency is what counts.

Departures from the paper: it leaves other worlds than powers of two to its supplement. With a lossy
wire, both partners go on with what they have read of each other's and of their own part, so that
all ranks keep the same bits; the first of the ranks that hold a part keeps its rounding error, and
the result goes to the surplus ranks without rounding.
"""

from __future__ import annotations

from hvd_sparse.collectives.sparcml import SparcmlCollective, combine_on
from hvd_sparse.streams import SUM, Operation, Part
from hvd_sparse.topology import Cube
from hvd_sparse.transports import Transport
from hvd_sparse.wire import Packer, PlainWire


def ssar_recursive_double(
    part: Part, transport: Transport, packer: Packer, operation: Operation = SUM
) -> list[Part]:
    """Combine the ranks' parts of one vector; every rank gets the same bits, as one part.

    Args:
        part: This rank's, of the whole vector.
        transport: All ranks call this together.
        packer: Encodes the messages.
        operation: Combines values; in the order of the ranks.
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
        theirs = packer.unpack(message, part.start, part.stop)
        ordered = [own, theirs] if transport.rank < peer else [theirs, own]
        part = combine_on(transport, ordered, operation)
    return [_unfold(part, cube, transport)]


class SsarRecursiveDouble(SparcmlCollective):
    """A sum by `ssar_recursive_double`."""

    combine_parts = staticmethod(ssar_recursive_double)


def _fold(
    part: Part, cube: Cube, transport: Transport, packer: Packer, operation: Operation
) -> Part:
    """The passive ranks hand over."""
    if cube.positions == transport.world_size:
        return part
    payload = packer.pack(part)[0] if cube.is_passive else None
    dst, src = (cube.partner, None) if cube.is_passive else (None, cube.partner)
    message = transport.exchange(payload, dst, src, channel="sparcml.fold").wait()
    if message is None:
        return part
    return combine_on(transport, [part, packer.unpack(message, part.start, part.stop)], operation)


def _unfold(part: Part, cube: Cube, transport: Transport) -> Part:
    """They get the result, without rounding."""
    if cube.positions == transport.world_size:
        return part
    plain = PlainWire(part.values.dtype, part.values.shape[1:])
    payload = None if cube.is_passive or cube.partner is None else plain.encode(part, 0)
    dst, src = (None, cube.partner) if cube.is_passive else (cube.partner, None)
    message = transport.exchange(payload, dst, src, channel="sparcml.unfold").wait()
    return part if message is None else plain.decode(message, part.start, part.stop)
