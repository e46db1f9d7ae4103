"""Reads what a `Recorder` has written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_sparse.engine.observer import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.errors import ConfigError
from hvd_sparse.recording.recorder import VERSION

REQUIRED = {
    "run": ("version", "rank", "world_size", "transport", "start_unix_s"),
    "plan": ("step", "buckets"),
    "steps": ("step", "steps", "at_s", "seconds", "threshold", "spans", *FIGURES),
    "residual": ("step", "bucket", "norm"),
    "ranks": ("step", *COMPARED_PHASES),
}
"""What a line of each kind must have."""


@dataclass
class Recording:
    """The lines of a recording, by kind, in the order in which they were written.

    Attributes:
        run: The first line.
        plans: Plans; each holds its own `steps` and `residuals`, whose buckets are the plan's.
        ranks: Comparisons of the ranks.
        truncated: Whether the last line is cut off, as after a kill.
    """

    run: dict[str, Any]
    plans: list[Plan] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The `steps` lines of all plans."""
        return [line for plan in self.plans for line in plan.steps]


@dataclass
class Plan:
    """One plan and what happened under it.

    Attributes:
        step: Steps done before it.
        buckets: Their descriptions.
        steps: Sums over steps, one list entry per bucket.
        residuals: Residual norms.
    """

    step: int
    buckets: list[dict[str, Any]]
    steps: list[dict[str, Any]] = field(default_factory=list)
    residuals: list[dict[str, Any]] = field(default_factory=list)


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording; a last line that is cut off is left out.

    Raises:
        ConfigError: The file is no recording; the message names the line.
        OSError: It cannot be read.
    """
    recording: Recording | None = None
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    if not lines[-1]:
        lines.pop()
    for number, text in enumerate(lines, 1):
        place = f"{os.fspath(path)}:{number}"
        try:
            line = _parse(text, place)
            if recording is None:
                recording = _begin(line, place)
            else:
                _add(recording, line, place)
        except ConfigError:
            if recording is None or number < len(lines):
                raise
            recording.truncated = True
    if recording is None:
        raise ConfigError(f"{os.fspath(path)}:1: an empty file is no recording")
    return recording


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not a line of a recording: {error}") from None
    if not isinstance(line, dict) or line.get("kind") not in REQUIRED:
        raise ConfigError(f"{place}: kind must be one of {', '.join(REQUIRED)}")
    missing = [key for key in REQUIRED[line["kind"]] if key not in line]
    if missing:
        raise ConfigError(f"{place}: a {line['kind']!r} line without {', '.join(missing)}")
    return line


def _begin(line: dict[str, Any], place: str) -> Recording:
    if line["kind"] != "run":
        raise ConfigError(f"{place}: a recording begins with a 'run' line, got {line['kind']!r}")
    if line["version"] != VERSION:
        raise ConfigError(f"{place}: version must be {VERSION}, got {line['version']!r}")
    return Recording(line)


def _add(recording: Recording, line: dict[str, Any], place: str) -> None:
    kind = line["kind"]
    if kind == "plan":
        recording.plans.append(Plan(line["step"], line["buckets"]))
        return
    if kind == "ranks":
        recording.ranks.append(line)
        return
    if kind == "run" or not recording.plans:
        raise ConfigError(f"{place}: a {kind!r} line out of place")
    plan = recording.plans[-1]
    if kind == "residual":
        plan.residuals.append(line)
        return
    for key in ("threshold", "spans", *FIGURES):
        if not isinstance(line[key], list) or len(line[key]) != len(plan.buckets):
            raise ConfigError(f"{place}: {key} must have one entry for each bucket of the plan")
    plan.steps.append(line)


def spans_of(recording: Recording) -> Iterator[tuple[Plan, dict[str, Any], int, str, float, float]]:
    """Every phase that was recorded: plan, line, bucket, phase, start and seconds."""
    for plan in recording.plans:
        for line in plan.steps:
            for bucket, spans in enumerate(line["spans"]):
                for name, (start_s, seconds) in spans.items():
                    yield plan, line, bucket, name, start_s, seconds
