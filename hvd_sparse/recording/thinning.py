"""What is written ever more rarely, so that a file grows with the logarithm of the run."""

from __future__ import annotations

ENTRIES_BEFORE_THINNING = 20_000
"""So many entries are written one step after the other, as many in every second step, as many in
every fourth, and so on. An entry is what a line says of one bucket or rank: up to 300 bytes."""


class Thinning:
    """Says whether a kind of line is due.

    Args:
        step: Steps done.
    """

    def __init__(self, step: int) -> None:
        self._entries = 0
        self._last_step = step

    def is_due(self, step: int) -> bool:
        """Whether enough steps have passed since the last line."""
        return step - self._last_step >= 1 << (self._entries // ENTRIES_BEFORE_THINNING)

    def wrote(self, step: int, entries: int) -> None:
        """Note a line with so many entries."""
        self._last_step = step
        self._entries += entries
