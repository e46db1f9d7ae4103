"""The simulated network, and the virtual clock of one rank in it.

This is a LogGP model (Alexandrov et al., SPAA '95). A message of L bytes occupies the sender's card
and then the receiver's card, for g + Lβ each. Its first byte needs α - g from one card to the
other. A message alone therefore arrives α + Lβ after it was sent, as in the papers' α-β model.
Messages through one card follow one another: with g = α, the default, M of them take M α + Σ Lβ,
as the papers count. Computing takes γ per unit of each kind of work (`Work`), and the card carries
on meanwhile.

A receiver's card takes each message into its first gap that is long enough. Messages are offered
to it in the order in which the rank waits for them, whatever the order in which threads run. So
the clocks of a simulation always show the same times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from hvd_sparse.checks import at_least, check_count
from hvd_sparse.cost_model import Link, Work


@dataclass(frozen=True)
class Network:
    """A network of equal hosts with one card each, with up to two levels and one slow rank.

    Attributes:
        link: α, β, γ and g between any two hosts. Each rank of a host has a fixed share of the
            host's card, and β is that of the share.
        local_size: L, ranks per host. Ranks of a host have consecutive numbers.
        inside: α, β and g between ranks of one host; None: as between hosts. Its γ is not used.
        slow_rank: A rank whose card and processor take `slow_factor` times as long, or None.
        slow_factor: At least 1.
    """

    link: Link
    local_size: int = 1
    inside: Link | None = None
    slow_rank: int | None = None
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        check_count("local_size", self.local_size, 1)
        at_least(1.0)("slow_factor", self.slow_factor)
        if self.slow_rank is not None:
            check_count("slow_rank", self.slow_rank, 0)

    def slowness(self, rank: int) -> float:
        return self.slow_factor if rank == self.slow_rank else 1.0

    def is_inside(self, one: int, other: int) -> bool:
        return one // self.local_size == other // self.local_size

    def between(self, one: int, other: int) -> tuple[float, float, float]:
        """α, β and g between two ranks."""
        link = self.link
        if self.inside is not None and self.is_inside(one, other):
            link = self.inside
        return link.alpha_s, link.beta_s_per_byte, link.g


@dataclass(frozen=True)
class Departure:
    """When a message's first and last byte can reach a card, and the sender's card is done."""

    head_s: float
    tail_s: float
    sent_s: float


class VirtualClock:
    """The virtual times of one rank: `now_s`, its processor's, and its card's both ways."""

    def __init__(self, network: Network, rank: int, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self._network = network
        self._rank = rank
        self._slowness = network.slowness(rank)
        self._sending_until_s = 0.0
        self._starts: list[float] = []  # when the card receives: disjoint spans, ascending
        self._ends: list[float] = []

    def send(self, nbytes: float, dst: int) -> Departure:
        """Hand a message to the card. The processor continues at once."""
        alpha_s, beta, gap_s = self._network.between(self._rank, dst)
        start_s = max(self.now_s, self._sending_until_s)
        self._sending_until_s = start_s + (gap_s + nbytes * beta) * self._slowness
        head_s = start_s + alpha_s - gap_s
        return Departure(head_s, self._sending_until_s + alpha_s - gap_s, self._sending_until_s)

    def receive(self, departure: Departure, nbytes: float, src: int) -> None:
        _, beta, gap_s = self._network.between(src, self._rank)
        here_s = self._take_card(departure.head_s, (gap_s + nbytes * beta) * self._slowness)
        self.wait_until(max(here_s, departure.tail_s))

    def work(self, work: Work) -> None:
        self.now_s += self._network.link.computing.seconds(work) * self._slowness

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)

    def _take_card(self, earliest_s: float, length_s: float) -> float:
        """Receive in the first gap that is long enough; returns the end of the reception."""
        starts, ends = self._starts, self._ends
        start_s = earliest_s
        i = bisect_right(ends, start_s)  # the first span that ends later
        while i < len(starts) and starts[i] < start_s + length_s:
            start_s = max(start_s, ends[i])
            i += 1
        end_s = start_s + length_s
        # Spans that touch become one, so a card that never rests has a single span.
        first = bisect_left(ends, start_s)
        last = bisect_right(starts, end_s)
        if first < last:
            start_s = min(start_s, starts[first])
            starts[first:last] = [start_s]
            ends[first:last] = [max(end_s, ends[last - 1])]
        else:
            starts.insert(first, start_s)
            ends.insert(first, end_s)
        return end_s
