"""A transport whose messages take virtual time.

It has the interface that all transports have, so collectives run on it as they are. Its traffic
counts what the other transports would put on the wire, but for the second message of a payload that
outgrew its receiver's guess.

A vector of a hundred million elements on each of a thousand ranks fits into no machine. So a
simulation may `stretch` messages: vectors are shorter than those that are meant by this factor, and
every byte of a message is counted, and takes time, as that many. What does not grow with the
vectors counts as it is: headers, `allgather`'s tables, `allreduce_sum`, and what an algorithm sends
for control.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from hvd_sparse.checks import check_at_least
from hvd_sparse.cost_model import Work
from hvd_sparse.errors import PlanError
from hvd_sparse.lab.simulator.network import Clock, Network
from hvd_sparse.lab.simulator.scheduler import Pick, Scheduler, first_come
from hvd_sparse.lab.simulator.station import SimulatedExchange, Station
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS
from hvd_sparse.transports.framing import Payload, flatten
from hvd_sparse.transports.transport import (
    ALIGNMENT,
    Done,
    Handle,
    Traffic,
    Transport,
    check_peers,
    round_up,
)

Result = TypeVar("Result")


class SimulatedWorld:
    """P ranks of a simulated network.

    Args:
        world_size: P.
        network: What connects them.
        stretch: How many bytes a byte of a vector stands for, at least 1.
        pick: See `Scheduler`; it makes no difference to what is simulated.
        control_bytes: Channels, and how much of each rank's payload there is not stretched.
    """

    def __init__(
        self,
        world_size: int,
        network: Network,
        stretch: float = 1.0,
        pick: Pick = first_come,
        control_bytes: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        check_at_least("stretch", stretch, 1.0)
        self.world_size = world_size
        self.network = network
        self.stretch = stretch
        self.control_bytes = dict(control_bytes)
        self.scheduler = Scheduler(world_size, pick)
        stations: list[Station] = []
        for rank in range(world_size):
            stations.append(Station(rank, network, self.scheduler, stations))
        self.transports = [SimulatedTransport(self, station) for station in stations]

    def run(self, fn: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Run `fn(transport)` on every rank, once; returns the results in order.

        Raises:
            BaseException: What the first rank to fail raised.
        """
        return self.scheduler.run(lambda rank: fn(self.transports[rank]))


class SimulatedTransport(Transport):
    """One rank of a `SimulatedWorld`, among all of its ranks or among a group of them.

    Args:
        world: The world.
        station: The rank.
        members: The ranks of the group, in order; None: all.
        kind: What tells groups with this rank in common apart. A group's calls are counted by
            themselves, since another group may make more of them.
    """

    name = "simulated"

    def __init__(
        self,
        world: SimulatedWorld,
        station: Station,
        members: Sequence[int] | None = None,
        kind: str = "",
    ) -> None:
        self.world = world
        self.members = tuple(range(world.world_size) if members is None else members)
        super().__init__(
            self.members.index(station.rank), len(self.members), timeout_s=float("inf")
        )
        self.traffic = station.traffic
        self.link = world.network.link
        self._station = station
        self._kind = kind
        self._calls = 0
        self._counts_as_is = False

    @property
    def clock(self) -> Clock:
        """This rank's virtual time; put a new one in its place to begin a measurement."""
        return self._station.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self._station.clock = clock

    @property
    def abroad(self) -> Traffic:
        """What of this rank's traffic went through its host's card."""
        return self._station.abroad

    def group(self, members: Sequence[int], kind: str) -> SimulatedTransport:
        """This rank among some of the world's; see the class."""
        return SimulatedTransport(self.world, self._station, members, kind)

    def pretend(self, nbytes: int, dst: int, src: int, *, channel: str) -> Handle:
        """An exchange of so many bytes, of which nothing but their number is there."""
        check_peers(self.rank, self.world_size, (), dst, src)
        return self._exchange(None, self._stretched(nbytes, channel), dst, src, channel)

    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        """See `Transport.exchange`."""
        nbytes = check_peers(self.rank, self.world_size, payload, dst, src)
        content = None if dst is None else flatten(payload or (), self._buffers)
        if dst == self.rank:
            return Done(content)
        return self._exchange(content, self._stretched(nbytes, channel), dst, src, channel)

    def allgather(self, payload: Payload, *, channel: str) -> list[torch.Tensor]:
        """See `Transport.allgather`: its messages, without a copy of every block at every rank."""
        P, r = self.world_size, self.rank
        if P <= DIRECT_ALLGATHER_RANKS:
            return super().allgather(payload, channel=channel)
        blocks = [flatten(payload, self._buffers)]
        while (distance := len(blocks)) < P:
            part = blocks[: P - distance]
            blocks_bytes = sum(self._stretched(round_up(b.numel()), channel) for b in part)
            nbytes = ALIGNMENT * len(part) + blocks_bytes
            peers = (r - distance) % P, (r + distance) % P
            blocks += self._exchange(part, nbytes, *peers, channel).content()
        return [blocks[(i - r) % P] for i in range(P)]

    def allreduce_sum(self, tensor: torch.Tensor, *, channel: str) -> torch.Tensor:
        """See `Transport.allreduce_sum`."""
        self._counts_as_is = True
        try:
            return super().allreduce_sum(tensor, channel=channel)
        finally:
            self._counts_as_is = False

    def worked(self, work: Work) -> None:
        """See `Transport.worked`: on longer vectors it is as much more, and one rank has none."""
        if self.world_size > 1:
            self.clock.work(work.times(self.world.stretch))

    def abort(self, reason: object = None) -> None:
        """See `Transport.abort`."""
        because = "no reason was given" if reason is None else reason
        self.world.scheduler.fail(PlanError(f"rank {self.rank} aborted the transport: {because}"))

    def close(self) -> None:
        """There is nothing to release."""

    def _stretched(self, nbytes: int, channel: str) -> float:
        """What a payload of so many bytes stands for."""
        if self._counts_as_is:
            return nbytes
        control = min(nbytes, self.world.control_bytes.get(channel, 0.0))
        return control + self.world.stretch * (nbytes - control)

    def _exchange(
        self, content: Any, nbytes: float, dst: int | None, src: int | None, channel: str
    ) -> SimulatedExchange:
        call = (self._kind, self._calls)
        self._calls += 1
        sent_s = 0.0
        if dst is not None:
            sent_s = self._station.send(content, nbytes, self.members[dst], call, channel)
        awaited = None if src is None else self.members[src]
        return SimulatedExchange(self._station, awaited, call, channel, sent_s)


def run_simulated(
    world_size: int,
    fn: Callable[[SimulatedTransport], Result],
    network: Network,
    *,
    stretch: float = 1.0,
    pick: Pick = first_come,
) -> list[Result]:
    """Run `fn(transport)` once per rank of a simulated network; see `SimulatedWorld`."""
    return SimulatedWorld(world_size, network, stretch, pick).run(fn)
