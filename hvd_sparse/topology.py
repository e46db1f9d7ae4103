"""Who talks to whom: arithmetic on ranks; nothing here sends a message.

Transports, collectives and the cost model share these functions, so that the model predicts what is
sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

DIRECT_ALLGATHER_RANKS = 4
"""Up to this many ranks, an allgather sends P - 1 messages at once, and else log2 P one by one: one
round beats several that wait for each other."""
MESSAGES_IN_FLIGHT = 4
"""Messages of one phase that a rank sends to different ranks at once: enough to hide latency, too
few to crowd a receiver."""


def batches(world_size: int) -> Iterator[range]:
    """The distances 1, …, P - 1 to the other ranks, `MESSAGES_IN_FLIGHT` at a time."""
    for first in range(1, world_size, MESSAGES_IN_FLIGHT):
        yield range(first, min(first + MESSAGES_IN_FLIGHT, world_size))


def in_flight(messages: int) -> int:
    """How many of a phase's messages start while another one is under way."""
    return messages - ceil(messages / MESSAGES_IN_FLIGHT)


def allgather_messages(world_size: int) -> int:
    """Messages that a rank sends in an allgather."""
    return world_size - 1 if world_size <= DIRECT_ALLGATHER_RANKS else ceil(log2(world_size))


def allgather_in_flight(world_size: int) -> int:
    """How many of these start while another one is under way; Bruck's wait for each other."""
    return in_flight(world_size - 1) if world_size <= DIRECT_ALLGATHER_RANKS else 0


def bruck_rounds(world_size: int) -> list[tuple[int, int]]:
    """Bruck's allgather for any P: distances, and how many blocks a rank sends so far."""
    distances = (1 << bit for bit in range((world_size - 1).bit_length()))
    return [(distance, min(distance, world_size - distance)) for distance in distances]


def allgather_loads(sizes: Sequence[int]) -> list[int]:
    """What each rank sends in an allgather of blocks of these sizes, by rank."""
    P = len(sizes)
    if P <= DIRECT_ALLGATHER_RANKS:
        return [size * (P - 1) for size in sizes]
    ends = np.cumsum([0, *sizes, *sizes])
    loads = np.zeros(P, dtype=np.int64)
    for _, count in bruck_rounds(P):
        loads += ends[count : count + P] - ends[:P]
    every: list[int] = loads.tolist()
    return every


def cube_positions(world_size: int) -> int:
    """The largest power of two up to P."""
    return 1 << (world_size.bit_length() - 1)


@dataclass(frozen=True)
class Cube:
    """A hypercube of positions over P ranks, after folding the ranks beyond a power of two.

    The first 2 (P - positions) ranks pair up: the odd one of a pair hands over to the even one, and
    then waits for the result. Positions keep the order of the ranks.
    """

    rank: int
    world_size: int

    @property
    def positions(self) -> int:
        return cube_positions(self.world_size)

    @property
    def _pairs(self) -> int:
        return self.world_size - self.positions

    @property
    def partner(self) -> int | None:
        """The other rank of this rank's pair, if it is in one."""
        return self.rank ^ 1 if self.rank < 2 * self._pairs else None

    @property
    def is_passive(self) -> bool:
        """Whether this rank hands over to its partner."""
        return self.partner is not None and self.rank % 2 == 1

    @property
    def position(self) -> int:
        """This rank's place in the cube, or its partner's."""
        return self.rank // 2 if self.partner is not None else self.rank - self._pairs

    def rank_at(self, position: int) -> int:
        """The rank at a position; for a pair, the one that exchanges."""
        return 2 * position if position < self._pairs else position + self._pairs

    def peer(self, mask: int) -> int | None:
        """The rank to exchange with in the round of a mask; None for a passive rank."""
        return None if self.is_passive else self.rank_at(self.position ^ mask)

    def masks(self) -> Iterator[int]:
        """The distances 1, 2, 4, … between positions."""
        return (1 << bit for bit in range(self.positions.bit_length() - 1))
