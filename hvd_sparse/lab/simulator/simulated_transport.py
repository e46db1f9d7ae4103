"""A transport whose messages take virtual time.

It has the interface of all transports, so collectives run on it unchanged. Its traffic counts what
other transports would put on the wire, except the second message of a payload that outgrew its
receiver's guess.

A vector of a hundred million elements on each of a thousand ranks fits into no machine. A
simulation can therefore `stretch` messages: its vectors are shorter by this factor, and every byte
of a message counts, and takes time, as that many. What does not grow with the vectors counts as it
is: headers, the tables of `allgather`, `allreduce_sum`, and an algorithm's control messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from typing_extensions import override

from hvd_sparse.checks import at_least
from hvd_sparse.cost_model import Work
from hvd_sparse.errors import PlanError
from hvd_sparse.lab.simulator.network import Departure, Network, VirtualClock
from hvd_sparse.lab.simulator.scheduler import Scheduler
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS
from hvd_sparse.transports.framing import HEADER_BYTES, Payload, flatten
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

    A byte of a vector stands for `stretch` bytes, at least 1, but for the first `control_bytes` of
    each rank's payload, by channel.
    """

    def __init__(
        self,
        world_size: int,
        network: Network,
        stretch: float = 1.0,
        control_bytes: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        at_least(1.0)("stretch", stretch)
        self.world_size, self.network, self.stretch = world_size, network, stretch
        self.control_bytes = dict(control_bytes)
        self.scheduler = Scheduler(world_size)
        self.transports = [SimulatedTransport(self, rank) for rank in range(world_size)]

    def run(self, fn: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Run `fn(transport)` on every rank, once; returns the results in order, or raises."""
        return self.scheduler.run(lambda rank: fn(self.transports[rank]))


class SimulatedTransport(Transport):
    """One rank of a `SimulatedWorld`, connected to all of its ranks or to a group of them.

    `number` is the rank's in the world, and `members` are the ranks of the group, in order; None:
    all. `kind` tells apart the groups that have this rank in common. Each counts its own calls,
    because another group may make more of them.

    Attributes:
        clock: The rank's virtual time. Assigning a new clock begins a measurement.
        abroad: The part of the rank's traffic that went through its host's card.
    """

    name = "simulated"

    def __init__(
        self,
        world: SimulatedWorld,
        number: int,
        members: Sequence[int] | None = None,
        kind: str = "",
    ) -> None:
        self.world, self.number = world, number
        self.members = tuple(range(world.world_size) if members is None else members)
        super().__init__(self.members.index(number), len(self.members), timeout_s=float("inf"))
        self.link = world.network.link
        # All groups of a rank share its clock, traffic and messages, which its first transport has.
        self._whole = self if members is None else world.transports[number]
        if members is None:
            self.clock, self.abroad = VirtualClock(world.network, number), Traffic()
            self._arrived: dict[_Key, _Message] = {}
            self._awaited: _Key | None = None
        self.traffic = self._whole.traffic
        self._kind, self._calls = kind, 0
        self._counts_as_is = False

    def group(self, members: Sequence[int], kind: str) -> SimulatedTransport:
        """This rank's transport to a group; arguments as for the class."""
        return SimulatedTransport(self.world, self.number, members, kind)

    def pretend(self, nbytes: int, dst: int, src: int, *, channel: str) -> Handle:
        """Exchange messages without content, which only take the time of so many bytes."""
        check_peers(self.rank, self.world_size, (), dst, src)
        return self._exchange(None, self._stretched(nbytes, channel), dst, src, channel)

    @override
    def exchange(
        self, payload: Payload | None, dst: int | None, src: int | None, *, channel: str
    ) -> Handle:
        nbytes = check_peers(self.rank, self.world_size, payload, dst, src)
        content = None if dst is None else flatten(payload or (), self._buffers)
        if dst == self.rank:
            return Done(content)
        return self._exchange(content, self._stretched(nbytes, channel), dst, src, channel)

    @override
    def allgather(self, payload: Payload, *, channel: str) -> list[torch.Tensor]:
        """The same messages, without a copy of every block on every rank."""
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

    @override
    def allreduce_sum(self, tensor: torch.Tensor, *, channel: str) -> torch.Tensor:
        self._counts_as_is = True
        try:
            return super().allreduce_sum(tensor, channel=channel)
        finally:
            self._counts_as_is = False

    @override
    def worked(self, work: Work) -> None:
        """Stretch the work as the vectors are; a single rank has none."""
        if self.world_size > 1:
            self._whole.clock.work(work.times(self.world.stretch))

    @override
    def abort(self, reason: object = None) -> None:
        because = "no reason was given" if reason is None else reason
        self.world.scheduler.fail(PlanError(f"rank {self.rank} aborted the transport: {because}"))

    @override
    def close(self) -> None:
        """Nothing has to be released."""

    def _stretched(self, nbytes: int, channel: str) -> float:
        """The bytes that a payload stands for."""
        if self._counts_as_is:
            return nbytes
        control = min(nbytes, self.world.control_bytes.get(channel, 0.0))
        return control + self.world.stretch * (nbytes - control)

    def _exchange(
        self, content: Any, nbytes: float, dst: int | None, src: int | None, channel: str
    ) -> SimulatedExchange:
        call, whole, sent_s = (self._kind, self._calls), self._whole, 0.0
        self._calls += 1
        if dst is not None:
            sent_s = whole._send(content, nbytes, self.members[dst], call, channel)
        awaited = None if src is None else self.members[src]

        def finish() -> Any:
            received = None if awaited is None else whole._take(awaited, call, channel)
            whole.clock.wait_until(sent_s)
            return received

        return SimulatedExchange(finish)

    def _send(self, content: Any, nbytes: float, dst: int, call: _Call, channel: str) -> float:
        """Hand a message to the card; returns the time at which the card is done with it."""
        size = round(nbytes) + HEADER_BYTES
        departure = self.clock.send(size, dst)
        self.traffic.sent(size)
        if not self.world.network.is_inside(self.number, dst):
            self.abroad.sent(size)
        message = _Message(content, size, channel, departure)
        self.world.transports[dst]._deliver((self.number, call), message)
        return departure.sent_s

    def _deliver(self, key: _Key, message: _Message) -> None:
        """Take in a message for this rank; called by its sender."""
        self._arrived[key] = message
        if self._awaited == key:
            self._awaited = None
            self.world.scheduler.wake(self.number)

    def _take(self, src: int, call: _Call, channel: str) -> Any:
        """Wait for a message, in turns and by the clock; returns its content."""
        key = (src, call)
        if key not in self._arrived:
            self._awaited = key
            self.world.scheduler.wait(self.number, f"channel {channel!r} from rank {src}")
        message = self._arrived.pop(key)
        if message.channel != channel:
            raise PlanError(
                f"rank {self.number} expects a message on channel {channel!r} from rank {src}, "
                f"which sent one on channel {message.channel!r}: the ranks make different calls"
            )
        self.clock.receive(message.departure, message.nbytes, src)
        self.traffic.received(message.nbytes)
        if not self.world.network.is_inside(self.number, src):
            self.abroad.received(message.nbytes)
        return message.content


_Call = tuple[str, int]
"""The kind of a group, and the number of a call in it."""
_Key = tuple[int, _Call]
"""A sender, and its call."""


class _Message(NamedTuple):
    content: Any
    nbytes: int
    channel: str
    departure: Departure


class SimulatedExchange(Handle):
    """A message that was sent, one that is awaited, or both; `finish` waits for them."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.content = cache(finish)

    @override
    def wait(self) -> torch.Tensor | None:
        content: torch.Tensor | None = self.content()
        return content
