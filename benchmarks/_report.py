"""The form in which every benchmark reports: one JSON object, and a table of the same rows."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from hvd_sparse import ops


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        case: What was measured on: sizes, densities, threads.
        metric: What was measured.
        value: Ours, in `unit`.
        baseline: What it is compared with, and that one's figure.
        ratio: Baseline over ours; above 1 is better.
        goal: As the requirement states it.
        met: Whether the goal was reached.
        spread: Least and most of `launches` launches, whose median `value` is.
        launches: How many; 1 where a figure has no spread.
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


def hardware() -> dict[str, str | int]:
    """What the figures depend on."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
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
    """Prints the rows as a table, and writes the report to `path` unless that is None."""
    facts = hardware()
    print(f"{benchmark}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    print(table(rows))
    if path is None:
        return
    report = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "hardware": facts,
        "rows": [asdict(row) for row in rows],
    }
    Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _spread(row: Row) -> str:
    if row.spread is None or row.launches == 1:
        return ""
    return f" ({row.spread[0]:.4g} to {row.spread[1]:.4g}, {row.launches} launches)"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
