"""Who talks to whom: arithmetic on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Cube:
    """A hypercube of positions over P ranks, after folding what is over a power of two.

    The first 2 (P - cube) ranks pair up: the odd one of a pair hands over to the even one and then
    waits for the result. Positions keep the order of the ranks.

    Attributes:
        rank: This rank.
        world_size: P.
    """

    rank: int
    world_size: int

    @property
    def positions(self) -> int:
        """The largest power of two up to P."""
        return 1 << (self.world_size.bit_length() - 1)

    @property
    def _pairs(self) -> int:
        return self.world_size - self.positions

    @property
    def partner(self) -> int | None:
        """The other one of this rank's pair, if it is in one."""
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
        """The rank that has a position."""
        return 2 * position if position < self._pairs else position + self._pairs

    def masks(self) -> Iterator[int]:
        """The distances 1, 2, 4, … between positions."""
        return (1 << bit for bit in range(self.positions.bit_length() - 1))
