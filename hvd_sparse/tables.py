"""Tables and figures for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Rows as aligned columns, the last one ragged."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def nbytes(count: float) -> str:
    """Bytes with a fitting unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def tensors(names: Sequence[str]) -> str:
    """The tensors of a bucket in a few words: one by its name, more by the ends of the row."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
