"""The first thing that ranks tell each other: which release of this package they run.

It goes over Horovod, as a tuple of plain values in front of everything else, so that any two
releases from this one on can read each other's. A rank that never sends it, as its optimizer was
given no compression, ends the wait of the others by their `timeout_s`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

from hvd_sparse._version import __version__
from hvd_sparse.errors import PlanError

PROTOCOL = 1
"""Goes up with each change of what goes over the wire."""


class Gatherer(Protocol):
    """The part of `choose.Bootstrap` that a handshake needs."""

    rank: int
    size: int

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, in order; collective."""


def package_version() -> str:
    """The release of this package that this rank runs."""
    return __version__


def greet(world: Gatherer, obj: Any, timeout_s: float) -> list[Any]:
    """Every rank's object, once all are known to run the same release; collective.

    Args:
        world: The ranks.
        obj: What this rank has to say; unpickled only where the releases are the same.
        timeout_s: Seconds until the ranks that have not come are given up.

    Raises:
        PlanError: Ranks run different releases; on all of them.
        TransportTimeout: Not all ranks came.
    """
    hello = (PROTOCOL, package_version(), pickle.dumps(obj))
    every = (
        [hello] if world.size == 1 else world.allgather_object(hello, "hvd_sparse.hello", timeout_s)
    )
    check_releases([(protocol, version) for protocol, version, *_ in every])
    return [pickle.loads(said) for _, _, said in every]


def check_releases(releases: Sequence[tuple[int, str]]) -> None:
    """Compares what the ranks run, in their order.

    Raises:
        PlanError: They run different releases.
    """
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, release in enumerate(releases):
        ranks_of.setdefault(release, []).append(rank)
    if len(ranks_of) > 1:
        told = "; ".join(
            f"{version} (protocol {protocol}) on ranks {_some(ranks)}"
            for (protocol, version), ranks in ranks_of.items()
        )
        raise PlanError(f"all ranks must run the same release of hvd_sparse, got {told}")


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
