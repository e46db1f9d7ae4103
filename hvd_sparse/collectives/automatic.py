"""The choice of a collective by size, density, world and link, from the cost model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_sparse.accumulator import Scope
from hvd_sparse.checks import check_choice
from hvd_sparse.collectives.base import Collective, Reduction, TakeAt
from hvd_sparse.collectives.link import link_of
from hvd_sparse.collectives.registry import BY_NAME, LOSSLESS_CANDIDATES, cheapest
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.wire import PLAIN, Wire

logger = logging.getLogger("hvd_sparse")


def cheapest_algorithm(
    transport: Transport,
    numel: int,
    k: int,
    algorithms: Sequence[str] = LOSSLESS_CANDIDATES,
    wire: Wire = PLAIN,
) -> str:
    """The algorithm with the least expected time on a transport; the same on every rank.

    Collective: the first call on a transport measures its link, unless that is known already; see
    `link_of`.

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


class AutomaticCollective(Collective):
    """The cheapest of some collectives; see `cheapest_algorithm`.

    All of the candidates by default apply every entry that is sent. So the choice, which depends on
    a measurement, changes what a step takes, and not what it computes. It is kept in the state: a
    run that goes on from one repeats it, in a world of the same size.

    Args:
        transport: See `Collective`.
        numel: See `Collective`.
        k: See `Collective`.
        wire: See `Collective`.
        algorithms: Names to choose from.

    Attributes:
        algorithm: The name of the one that was chosen.
    """

    def __init__(
        self,
        transport: Transport,
        numel: int,
        k: int,
        *,
        wire: Wire = PLAIN,
        algorithms: Sequence[str] = LOSSLESS_CANDIDATES,
    ) -> None:
        super().__init__(transport, numel, k, wire=wire)
        self._candidates = {
            name: BY_NAME[name].collective(transport, numel, k, wire=wire) for name in algorithms
        }
        self.algorithm = cheapest_algorithm(transport, numel, k, algorithms, wire)
        self._tell("chosen by the cost model")

    @property
    def chosen(self) -> Collective:
        """See `Collective.chosen`."""
        return self._candidates[self.algorithm]

    @property
    def device(self) -> torch.device | None:
        """See `Collective.device`."""
        return self.chosen.device

    def reduce(self, stream: SparseStream, take_at: TakeAt | None = None) -> Reduction:
        """See `Collective.reduce`."""
        reduction = self.chosen.reduce(stream, take_at)
        self.step = self.chosen.step
        return reduction

    def scope(self) -> Scope | None:
        """See `Collective.scope`."""
        return self.chosen.scope()

    def aim(self, k: int) -> None:
        """See `Collective.aim`."""
        super().aim(k)
        self.chosen.aim(k)

    def state_dict(self) -> dict[str, Any]:
        """See `Collective.state_dict`; the choice is a part of it."""
        return {
            **super().state_dict(),
            "algorithm": self.algorithm,
            "world_size": self.transport.world_size,
            "candidates": {name: each.state_dict() for name, each in self._candidates.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Collective.load_state_dict`; another world's choice is not repeated.

        Raises:
            ConfigError: The state has chosen what is no candidate here.
        """
        algorithm = check_choice("algorithm", state["algorithm"], self._candidates)
        if int(state["world_size"]) == self.transport.world_size and algorithm != self.algorithm:
            self.algorithm = algorithm
            self._tell("as in the state that was loaded")
        super().load_state_dict(state)
        for name, each in self._candidates.items():
            each.load_state_dict(state["candidates"][name])
        if not BY_NAME[self.algorithm].keeps_state:  # one that does may begin anew
            self.chosen.step = self.step  # where another one was chosen before

    def _tell(self, why: str) -> None:
        logger.info(
            "rank %d of %d sums %d of %d elements by %s: %s",
            *(self.transport.rank, self.transport.world_size, self.k, self.numel),
            *(self.algorithm, why),
        )
