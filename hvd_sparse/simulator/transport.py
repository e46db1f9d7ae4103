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

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from hvd_sparse.checks import check_at_least
from hvd_sparse.errors import PlanError
from hvd_sparse.simulator.network import Clock, Departure, Network
from hvd_sparse.simulator.scheduler import Pick, Scheduler, first_come
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS
from hvd_sparse.transports.base import (
    ALIGNMENT,
    Done,
    Handle,
    Transport,
    check_peers,
    round_up,
)
from hvd_sparse.transports.framing import HEADER_BYTES, Payload, flatten
from hvd_sparse.work import Work

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
        self.transports = [SimulatedTransport(self, rank) for rank in range(world_size)]

    def run(self, fn: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Run `fn(transport)` on every rank, once; returns the results in order.

        Raises:
            BaseException: What the first rank to fail raised.
        """
        return self.scheduler.run(lambda rank: fn(self.transports[rank]))


class SimulatedTransport(Transport):
    """One rank of a `SimulatedWorld`.

    Attributes:
        clock: This rank's virtual time; put a new one in its place to begin a measurement.
    """

    name = "simulated"

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        super().__init__(rank, world.world_size, timeout_s=float("inf"))
        self.world = world
        self.link = world.network.link
        self.clock = Clock(world.network, rank)
        self._calls = 0
        self._arrived: dict[tuple[int, int], _Message] = {}  # by sender and number of the call
        self._awaited: tuple[int, int] | None = None
        self._counts_as_is = False

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
    ) -> _Exchange:
        call = self._calls
        self._calls += 1
        sent_s = 0.0
        if dst is not None:
            nbytes = round(nbytes) + HEADER_BYTES
            departure = self.clock.send(nbytes, dst)
            sent_s = departure.sent_s
            self.traffic.sent(nbytes)
            self.world.transports[dst].deliver(
                (self.rank, call), _Message(content, nbytes, channel, departure)
            )
        return _Exchange(self, src, call, channel, sent_s)

    def deliver(self, key: tuple[int, int], message: _Message) -> None:
        """A message for this rank is there; called by its sender."""
        self._arrived[key] = message
        if self._awaited == key:
            self._awaited = None
            self.world.scheduler.wake(self.rank)

    def take(self, src: int, call: int, channel: str) -> Any:
        """Wait for a message, in turns and by the clock; returns its content."""
        key = (src, call)
        if key not in self._arrived:
            self._awaited = key
            self.world.scheduler.wait(self.rank, f"channel {channel!r} from rank {src}")
        message = self._arrived.pop(key)
        if message.channel != channel:
            raise PlanError(
                f"rank {self.rank} expects a message on channel {channel!r} from rank {src}, which "
                f"sent one on channel {message.channel!r}: the ranks make different calls"
            )
        self.clock.receive(message.departure, message.nbytes, src)
        self.traffic.received(message.nbytes)
        return message.content


class _Message:
    __slots__ = ("channel", "content", "departure", "nbytes")

    def __init__(self, content: Any, nbytes: int, channel: str, departure: Departure) -> None:
        self.content = content
        self.nbytes = nbytes
        self.channel = channel
        self.departure = departure


class _Exchange(Handle):
    __slots__ = ("_call", "_channel", "_content", "_open", "_sent_s", "_src", "_transport")

    def __init__(
        self, transport: SimulatedTransport, src: int | None, call: int, channel: str, sent_s: float
    ) -> None:
        self._transport = transport
        self._src = src
        self._call = call
        self._channel = channel
        self._sent_s = sent_s
        self._content: Any = None
        self._open = True

    def content(self) -> Any:
        if self._open:
            self._open = False
            if self._src is not None:
                self._content = self._transport.take(self._src, self._call, self._channel)
            self._transport.clock.wait_until(self._sent_s)
        return self._content

    def wait(self) -> torch.Tensor | None:
        """See `Handle.wait`."""
        content: torch.Tensor | None = self.content()
        return content


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
