"""The choice of a collective by size, density, world and link, from the cost model."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_sparse.collectives.base import Collective
from hvd_sparse.collectives.link import link_of
from hvd_sparse.collectives.registry import BY_NAME, CANDIDATES, LOSSLESS_CANDIDATES, cheapest
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire


def cheapest_algorithm(
    transport: Transport,
    numel: int,
    k: int,
    algorithms: Sequence[str] = LOSSLESS_CANDIDATES,
    wire: Wire = PLAIN,
) -> str:
    """The algorithm with the least expected time on a transport; the same on every rank.

    Collective: the first call on a transport measures its link, unless `transport.link` is given.

    Args:
        transport: What the messages go over.
        numel: n, equal on all ranks.
        k: Entries of a rank, equal on all ranks.
        algorithms: Names that have a formula; among equals the first one wins.
        wire: The form of the messages; what it is expected to take counts.

    Raises:
        TransportError: A peer is gone or did not answer.
    """
    P, link = transport.world_size, link_of(transport)
    return cheapest(algorithms, P, numel, k, link, wire.expected_bytes(numel, k))


def automatic_collective(
    transport: Transport, numel: int, k: int, *, wire: Wire = PLAIN
) -> Collective:
    """The cheapest of `CANDIDATES`; see `cheapest_algorithm`.

    Which one that is depends on a measurement, so two runs may differ where two cost about the
    same. Name a collective, or set `transport.link`, where they must not.
    """
    name = cheapest_algorithm(transport, numel, k, CANDIDATES, wire)
    return BY_NAME[name].collective(transport, numel, k, wire=wire)
