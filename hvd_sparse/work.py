"""What a rank computes in a reduction, by kind, and the seconds that each kind takes.

Copies are no kind of their own: a message's copy is a part of β, which is measured through the same
call.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hvd_sparse.checks import check_at_least

INDEX_BYTES, VALUE_BYTES = 4, 4


@dataclass(frozen=True)
class Work:
    """Counts of entries and values.

    Attributes:
        merged_entries: Entries of sparse parts that are merged to a sparse one.
        scattered_entries: Entries that are written, or added, into a dense part.
        added_values: Values of dense parts that are filled, copied or added.
        scanned_values: Values of a dense sum that are looked at, and scaled into a gradient.
        selected_entries: Entries out of which some are taken, by magnitude or by index.
    """

    merged_entries: float = 0.0
    scattered_entries: float = 0.0
    added_values: float = 0.0
    scanned_values: float = 0.0
    selected_entries: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, n) + getattr(other, n) for n in KINDS))

    def times(self, factor: float) -> Work:
        """So many times as much."""
        return Work(*(getattr(self, n) * factor for n in KINDS))


KINDS = tuple(item.name for item in fields(Work))
NO_WORK = Work()


@dataclass(frozen=True)
class Pace:
    """Seconds of each kind of work, for an entry or a value of float32.

    Attributes:
        merged_entries: See `Work`; so the others.
    """

    merged_entries: float = 0.0
    scattered_entries: float = 0.0
    added_values: float = 0.0
    scanned_values: float = 0.0
    selected_entries: float = 0.0

    def __post_init__(self) -> None:
        for name in KINDS:
            check_at_least(name, getattr(self, name), 0.0)

    @staticmethod
    def of_bytes(seconds: float) -> Pace:
        """The same seconds for every byte, whatever is done with it."""
        entry_s, value_s = (INDEX_BYTES + VALUE_BYTES) * seconds, VALUE_BYTES * seconds
        return Pace(entry_s, entry_s, value_s, value_s, entry_s)

    def seconds(self, work: Work, value_bytes: float = VALUE_BYTES) -> float:
        """What work takes.

        Args:
            work: How much of each kind.
            value_bytes: Of a value, or of a row of values; what is longer takes longer.
        """
        by_values = value_bytes / VALUE_BYTES
        by_entries = (INDEX_BYTES + value_bytes) / (INDEX_BYTES + VALUE_BYTES)
        total: float = sum(
            getattr(work, name)
            * getattr(self, name)
            * (by_values if name.endswith("values") else by_entries)
            for name in KINDS
        )
        return total
