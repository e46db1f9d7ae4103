"""Tables and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns, as text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def nbytes(count: float) -> str:
    """Bytes in a suitable unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def tensors(names: Sequence[str]) -> str:
    """A bucket's tensors in a few words: the name of the only one, or the first and last name."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def shown_s(value: float) -> str:
    """Seconds in a suitable unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
