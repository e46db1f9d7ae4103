"""Tables for docs/results.md, out of a benchmark's report.

    python -m benchmarks.markdown benchmarks/results/training.json

A table has a line for each way and a column for each world. Below it stands what was promised.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WAY = re.compile(
    r"step, (?P<step>[^,]+)|(?P<reduced>.+), through the optimizer|time to .*, (?P<time>.+)"
)
"""The metrics of which there is a column, each with the way that it is of."""


def way_of(metric: str) -> str | None:
    match = WAY.match(metric)
    return None if match is None else next(filter(None, match.groups()))


def figure(value: float) -> str:
    """As many digits as a reader wants."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def measured(row: dict[str, Any]) -> str:
    """A row's figure, and its spread where there were several launches."""
    words = f"{figure(row['value'])} {row['unit']}"
    if row.get("launches", 1) == 1 or not row.get("spread"):
        return words
    least, most = map(figure, row["spread"])
    return f"{words} ({least} to {most})"


def comparison(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """All ways in all worlds, with the factor over the baseline."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        way = way_of(row["metric"])
        if way is None or row["case"] in cells.get(way, {}):
            continue
        factor = "" if row["ratio"] is None else f", {row['ratio']:.2g} ×"
        cells.setdefault(way, {})[row["case"]] = measured(row) + factor
    worlds = list(dict.fromkeys(world for found in cells.values() for world in found))
    yield from table(
        ["", *worlds], [[w, *(c.get(x, "") for x in worlds)] for w, c in cells.items()]
    )


def promises(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows that have a goal, with their spread."""
    lines = []
    for row in rows:
        if row["goal"] is None:
            continue
        factor = "" if row["ratio"] is None else f", {row['ratio']:.2g} ×"
        is_met = "yes" if row["met"] else "**no**"
        found = [measured(row) + factor, row["baseline"] or "", str(row["goal"]), is_met]
        lines.append([row["case"], row["metric"], *found])
    yield from table(["where", "what", "median (spread)", "against", "goal", "met"], lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    if lines:
        for line in (head, ["---"] * len(head), *lines):
            yield "| " + " | ".join(line) + " |"
        yield ""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    rows = json.loads(parser.parse_args().report.read_text(encoding="utf-8"))["rows"]
    print("\n".join([*comparison(rows), *promises(rows)]))


if __name__ == "__main__":
    main()
