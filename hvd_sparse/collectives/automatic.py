"""The choice of a collective by size, density, world and link, from the cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hvd_sparse.collectives.base import Collective
from hvd_sparse.collectives.dsar_split_allgather import DsarSplitAllgather
from hvd_sparse.collectives.link import link_of
from hvd_sparse.collectives.oktopk import OkTopk
from hvd_sparse.collectives.ssar_recursive_double import SsarRecursiveDouble
from hvd_sparse.collectives.ssar_split_allgather import SsarSplitAllgather
from hvd_sparse.collectives.topk_allgather import TopkAllgather
from hvd_sparse.cost_model import cheapest
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

LOSSLESS: Mapping[str, Callable[..., Collective]] = {
    "topk_allgather": TopkAllgather,
    "ssar_recursive_double": SsarRecursiveDouble,
    "ssar_split_allgather": SsarSplitAllgather,
    "dsar_split_allgather": DsarSplitAllgather,
}
"""What sums all that the ranks bring. With two ranks the first two send the same."""
CANDIDATES: Mapping[str, Callable[..., Collective]] = {**LOSSLESS, "oktopk": OkTopk}
"""The same, and what applies the k largest of the sum."""


def cheapest_algorithm(
    transport: Transport,
    numel: int,
    k: int,
    algorithms: Sequence[str] = tuple(LOSSLESS),
    wire: Wire = PLAIN,
) -> str:
    """The algorithm with the least expected time on a transport; the same on every rank.

    Collective: the first call on a transport measures its link, unless `transport.link` is given.

    Args:
        transport: What the messages go over.
        numel: n, equal on all ranks.
        k: Entries of a rank, equal on all ranks.
        algorithms: Names that `hvd_sparse.cost_model` knows; among equals the first one wins.
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
    name = cheapest_algorithm(transport, numel, k, tuple(CANDIDATES), wire)
    return CANDIDATES[name](transport, numel, k, wire=wire)
