"""One rank of a simulated world: its clock, its traffic, and the messages on their way to it."""

from __future__ import annotations

from typing import Any

import torch

from hvd_sparse.errors import PlanError
from hvd_sparse.lab.simulator.network import Clock, Departure, Network
from hvd_sparse.lab.simulator.scheduler import Scheduler
from hvd_sparse.transports.framing import HEADER_BYTES
from hvd_sparse.transports.transport import Handle, Traffic

Call = tuple[str, int]
"""The kind of a group, and the number of its call."""
Key = tuple[int, Call]
"""A sender, and its call."""


class Station:
    """One rank; its transports, of all ranks and of groups, share it.

    Args:
        rank: Its number in the world.
        network: What connects the ranks.
        scheduler: Lets them take turns.
        every: The stations of all ranks, this one among them in the end.

    Attributes:
        clock: This rank's virtual time.
        traffic: What it sent and received.
        abroad: What of that went through its host's card.
    """

    def __init__(
        self, rank: int, network: Network, scheduler: Scheduler, every: list[Station]
    ) -> None:
        self.rank = rank
        self.clock = Clock(network, rank)
        self.traffic = Traffic()
        self.abroad = Traffic()
        self._network = network
        self._scheduler = scheduler
        self._every = every
        self._arrived: dict[Key, _Message] = {}
        self._awaited: Key | None = None

    def send(self, content: Any, nbytes: float, dst: int, call: Call, channel: str) -> float:
        """Hand a message to the card; returns when that is done with it."""
        size = round(nbytes) + HEADER_BYTES
        departure = self.clock.send(size, dst)
        self.traffic.sent(size)
        if not self._network.is_inside(self.rank, dst):
            self.abroad.sent(size)
        message = _Message(content, size, channel, departure)
        self._every[dst].deliver((self.rank, call), message)
        return departure.sent_s

    def deliver(self, key: Key, message: _Message) -> None:
        """A message for this rank is there; called by its sender."""
        self._arrived[key] = message
        if self._awaited == key:
            self._awaited = None
            self._scheduler.wake(self.rank)

    def take(self, src: int, call: Call, channel: str) -> Any:
        """Wait for a message, in turns and by the clock; returns its content."""
        key = (src, call)
        if key not in self._arrived:
            self._awaited = key
            self._scheduler.wait(self.rank, f"channel {channel!r} from rank {src}")
        message = self._arrived.pop(key)
        if message.channel != channel:
            raise PlanError(
                f"rank {self.rank} expects a message on channel {channel!r} from rank {src}, which "
                f"sent one on channel {message.channel!r}: the ranks make different calls"
            )
        self.clock.receive(message.departure, message.nbytes, src)
        self.traffic.received(message.nbytes)
        if not self._network.is_inside(self.rank, src):
            self.abroad.received(message.nbytes)
        return message.content


class _Message:
    __slots__ = ("channel", "content", "departure", "nbytes")

    def __init__(self, content: Any, nbytes: int, channel: str, departure: Departure) -> None:
        self.content = content
        self.nbytes = nbytes
        self.channel = channel
        self.departure = departure


class SimulatedExchange(Handle):
    """A message that was sent, another one that is awaited, or both."""

    __slots__ = ("_call", "_channel", "_content", "_open", "_sent_s", "_src", "_station")

    def __init__(
        self, station: Station, src: int | None, call: Call, channel: str, sent_s: float
    ) -> None:
        self._station = station
        self._src = src
        self._call = call
        self._channel = channel
        self._sent_s = sent_s
        self._content: Any = None
        self._open = True

    def content(self) -> Any:
        """What came, whatever it is; None without a source."""
        if self._open:
            self._open = False
            if self._src is not None:
                self._content = self._station.take(self._src, self._call, self._channel)
            self._station.clock.wait_until(self._sent_s)
        return self._content

    def wait(self) -> torch.Tensor | None:
        """See `Handle.wait`."""
        content: torch.Tensor | None = self.content()
        return content
