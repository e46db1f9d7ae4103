"""Rows of results, on disk as soon as they are known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "rows.jsonl"
LONGEST_ERROR = 2000


class Results:
    """Appends rows to a file, one JSON object a line.

    Args:
        folder: Where the file is.
        phase: Whose rows they are.

    Attributes:
        folder: The same.
        phase: The same.
    """

    def __init__(self, folder: Path, phase: str) -> None:
        self.folder = folder
        self.phase = phase
        self._path = folder / FILE

    def row(
        self, name: str, values: Mapping[str, object] | None = None, *, ok: bool = True, **more: Any
    ) -> None:
        """Write one row, and print it."""
        row = {"phase": self.phase, "name": name, "ok": ok, **(values or {}), **more}
        with self._path.open("a+b") as file:
            if file.tell() and self._path.read_bytes()[-1:] != b"\n":
                file.write(b"\n")  # a phase was killed while it wrote
            file.write(json.dumps(row).encode() + b"\n")
        print(as_text(row), flush=True)

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Makes a row of what fails within, so that the rest of the phase goes on."""
        started_s = time.perf_counter()
        try:
            yield
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[-LONGEST_ERROR:]
            self.row(name, ok=False, error=told, seconds=time.perf_counter() - started_s)


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows that are whole: a phase may have been killed while it wrote one."""
    path, rows = folder / FILE, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def as_text(row: dict[str, Any]) -> str:
    """A row in one line."""
    values = {key: value for key, value in row.items() if key not in ("phase", "name", "ok")}
    told = "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
    return f"{'ok    ' if row['ok'] else 'FAILED'}  {row['phase']:<10} {row['name']}  {told}"
