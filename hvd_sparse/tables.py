"""Tables and figures for people."""

from __future__ import annotations

import argparse
import re
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


# MERGED cli.units
# Rates and times as `tc` and people write them.

TIME_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
RATE_BIT_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
RATE_BIT_PER_S |= {"kbyte": 8e3, "mbyte": 8e6, "gbyte": 8e9, "tbyte": 8e12}


def _parse(text: str, units: dict[str, float], example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and one of {', '.join(units)}, as {example}; got {text!r}"
        )
    return float(match[1]) * units[match[2]]


def seconds(text: str) -> float:
    """`30us` in seconds."""
    return _parse(text, TIME_S, "30us")


def bytes_per_s(text: str) -> float:
    """`25gbit`, or `300gbyte`, in bytes per second."""
    return _parse(text, RATE_BIT_PER_S, "25gbit") / 8


def shown_s(value: float) -> str:
    """Seconds with a fitting unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
