"""The form of every benchmark's report: one JSON object, and a table of the same rows.

    python -m benchmarks.report benchmarks/results/training.json

prints a report as Markdown tables: a line for each way and a column for each world, then the goals.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hvd_sparse import ops, tables
from hvd_sparse.planner.costs import processor

WAY = re.compile(
    r"step, (?P<step>\S+?)(?:, |$)|(?P<reduced>.+), through the optimizer|time to .*, (?P<time>.+)"
)
"""The metrics that have a column, with the way that each is of."""


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        case: What was measured on: sizes, densities, threads.
        metric: What was measured.
        value: Our figure, in `unit`.
        baseline: Name and figure of what it is compared with.
        ratio: Baseline over ours; above 1 is better.
        goal: The goal, as the requirement states it.
        met: Whether the goal was reached.
        spread: Least and most of the launches; `value` is their median.
        launches: Number of launches; 1 without a spread.
    """

    case: str
    metric: str
    value: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    goal: str | float | None = None
    met: bool | None = None
    spread: tuple[float, float] | None = None
    launches: int = 1


@dataclass(frozen=True)
class Spread:
    """A figure over several launches."""

    middle: float
    least: float
    most: float
    launches: int

    @classmethod
    def of(
        cls, results: Sequence[Any], figure: Callable[[Any], float], scale: float = 1.0
    ) -> Spread:
        values = [scale * figure(result) for result in results]
        return cls(median(values), min(values), max(values), len(values))


def row_of(case: str, metric: str, figure: Spread, unit: str = "ms", **facts: Any) -> Row:
    """A row for the median of several launches."""
    return Row(
        case,
        metric,
        figure.middle,
        unit,
        spread=(figure.least, figure.most),
        launches=figure.launches,
        **facts,
    )


def hardware() -> dict[str, str | int]:
    """The machine and versions that the figures depend on."""
    facts: dict[str, str | int] = {
        "cpu": processor(),
        "cores": os.cpu_count() or 1,
        "ops": ops.backend(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def write_report(benchmark: str, rows: Sequence[Row], path: Path | str | None) -> None:
    """Prints the rows as a table, and writes the report to `path` unless that is None.

    The file is JSON: the head in its first line, then one row per line.
    """
    facts = hardware()
    print(f"{benchmark}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    print(table(rows))
    if path is None:
        return
    head = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "hardware": facts,
    }
    lines = ",\n".join(json.dumps(as_object(row), ensure_ascii=False) for row in rows)
    whole = json.dumps({**head, "rows": []}, ensure_ascii=False)[:-2] + f"\n{lines}\n]}}\n"
    Path(path).write_text(whole, encoding="utf-8")


def as_object(row: Row) -> dict[str, Any]:
    """The row for JSON: five significant digits, without defaults."""
    return {
        field.name: _rounded(value)
        for field in fields(row)
        if (value := getattr(row, field.name)) != field.default
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = [("case", "metric", "value", "baseline", "ratio", "goal", "met")]
    for row in rows:
        cells.append(
            (
                row.case,
                row.metric,
                f"{row.value:.4g} {row.unit}" + _spread(row),
                row.baseline or "",
                "" if row.ratio is None else f"{row.ratio:.2f}",
                "" if row.goal is None else str(row.goal),
                "" if row.met is None else ("yes" if row.met else "NO"),
            )
        )
    return tables.table(cells)


def _spread(row: Row) -> str:
    if row.spread is None or row.launches == 1:
        return ""
    return f" ({row.spread[0]:.4g} to {row.spread[1]:.4g}, {row.launches} launches)"


def way_of(metric: str) -> str | None:
    match = WAY.match(metric)
    return None if match is None else next(filter(None, match.groups()))


def figure(value: float) -> str:
    """Three significant digits, and all digits of larger whole numbers."""
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
        factor = f", {row['ratio']:.2g} ×" if "ratio" in row else ""
        cells.setdefault(way, {})[row["case"]] = measured(row) + factor
    worlds = list(dict.fromkeys(world for found in cells.values() for world in found))
    yield from markdown_table(
        ["", *worlds], [[w, *(c.get(x, "") for x in worlds)] for w, c in cells.items()]
    )


def promises(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows that have a goal, with their spread."""
    lines = []
    for row in rows:
        if "goal" not in row:
            continue
        factor = f", {row['ratio']:.2g} ×" if "ratio" in row else ""
        is_met = "yes" if row.get("met") else "**no**"
        found = [measured(row) + factor, row.get("baseline", ""), str(row["goal"]), is_met]
        lines.append([row["case"], row["metric"], *found])
    yield from markdown_table(["where", "what", "median (spread)", "against", "goal", "met"], lines)


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    if lines:
        for line in (head, ["---"] * len(head), *lines):
            yield "| " + " | ".join(line) + " |"
        yield ""


def main() -> None:
    """Print the tables of a report."""
    parser = argparse.ArgumentParser(description="Print a report's rows as Markdown tables.")
    parser.add_argument("report", type=Path)
    rows = json.loads(parser.parse_args().report.read_text(encoding="utf-8"))["rows"]
    print("\n".join([*comparison(rows), *promises(rows)]))


if __name__ == "__main__":
    main()
