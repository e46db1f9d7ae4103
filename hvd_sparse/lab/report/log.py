"""Reads what a `Recorder` has written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_sparse.engine.account import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.report.format import check_line, is_count
from hvd_sparse.recording.recorder import VERSION


@dataclass
class Recording:
    """The lines of a run, by kind, in the order in which they were written.

    Attributes:
        run: The first line.
        plans: Plans; each holds its own `steps` and `residuals`, whose buckets are the plan's.
        ranks: Comparisons of the ranks.
        trials: What planners tried and chose.
        torn_lines: Lines that were cut off, by a kill or a full disk, while this was the file's
            last run; nothing of them is known.
    """

    run: dict[str, Any]
    plans: list[Plan] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    torn_lines: int = 0

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


def read_runs(path: str | os.PathLike[str]) -> list[Recording]:
    """Read all runs of a file, in the order of their beginnings.

    Lines that are cut off are left out and counted, runs of other versions are left out.

    Raises:
        ConfigError: A line is not as it must be, or there is no run; the message names the line.
        OSError: The file cannot be read.
    """
    reader = Reader(os.fspath(path))
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    for number, content in enumerate(text.split("\n"), 1):
        if content.strip():  # an empty line parts the runs
            reader.read(content, number)
    if not reader.runs:
        raise ConfigError(reader.refusal or f"{reader.path}:1: an empty file is no recording")
    return list(reader.runs.values())


def chosen_run(runs: list[Recording], number: int | None) -> Recording:
    """A run by its number, from 1; None: the last one.

    Raises:
        ConfigError: There is no such run.
    """
    if number is None:
        return runs[-1]
    if not 1 <= number <= len(runs):
        raise ConfigError(f"run must be from 1 to {len(runs)}, got {number}")
    return runs[number - 1]


class Reader:
    """Puts lines together to runs, one after the other.

    Args:
        path: The file's name, for messages.

    Attributes:
        runs: By their ids.
        refusal: What is wrong with the file if it proves to hold no run.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.runs: dict[str, Recording] = {}
        self.refusal: str | None = None
        self._last: Recording | None = None
        self._torn_lines = 0  # before the first run

    def read(self, content: str, number: int) -> None:
        """Take in one line."""
        place = f"{self.path}:{number}"
        try:
            line = json.loads(content)
        except (ValueError, RecursionError) as error:
            self.refusal = self.refusal or f"{place}: not a line of a recording: {error}"
            if self._last is None:
                self._torn_lines += 1
            else:
                self._last.torn_lines += 1
            return
        if isinstance(line, dict) and _is_of_another_version(line):
            self.refusal = f"{place}: version must be {VERSION}, got {line['version']}"
        elif isinstance(line, dict) and self.refusal and not self._is_known(line):
            pass  # its run's first line is of another version or torn
        else:
            self._add(check_line(line, place), place)

    def _is_known(self, line: dict[str, Any]) -> bool:
        return line.get("kind") == "run" or str(line.get("id")) in self.runs

    def _add(self, line: dict[str, Any], place: str) -> None:
        kind, run = line["kind"], self.runs.get(line["id"])
        if kind == "run":
            if run is not None or line["rank"] >= line["world_size"]:
                raise ConfigError(f"{place}: a second run of one id, or a rank outside its world")
            self._last = self.runs[line["id"]] = Recording(line, torn_lines=self._torn_lines)
            self._torn_lines = 0
        elif run is None:
            raise ConfigError(f"{place}: a {kind!r} line before the 'run' line that it belongs to")
        elif kind == "plan":
            run.plans.append(Plan(line["step"], line["buckets"]))
        elif kind == "ranks":
            _check_lengths(line, COMPARED_PHASES, run.run["world_size"], place)
            run.ranks.append(line)
        elif kind == "trial":
            if line["chosen"] >= len(line["tried"]):
                raise ConfigError(f"{place}: plan {line['chosen']} is not in the trial")
            run.trials.append(line)
        elif not run.plans:
            raise ConfigError(f"{place}: a {kind!r} line before any plan")
        elif kind == "residual":
            if line["bucket"] >= len(run.plans[-1].buckets):
                raise ConfigError(f"{place}: bucket {line['bucket']} is not in the plan")
            run.plans[-1].residuals.append(line)
        else:
            keys = ("collective", "threshold", "imbalance", "spans", *FIGURES)
            _check_lengths(line, keys, len(run.plans[-1].buckets), place)
            run.plans[-1].steps.append(line)


def _is_of_another_version(line: dict[str, Any]) -> bool:
    version = line.get("version")
    return line.get("kind") == "run" and is_count(version) and version != VERSION


def _check_lengths(line: dict[str, Any], keys: Sequence[str], length: int, place: str) -> None:
    for key in keys:
        if len(line[key]) != length:
            raise ConfigError(f"{place}: {key} must have {length} entries, got {len(line[key])}")


def spans_of(recording: Recording) -> Iterator[tuple[Plan, dict[str, Any], int, str, float, float]]:
    """Every phase that was recorded: plan, line, bucket, phase, start and seconds."""
    for plan in recording.plans:
        for line in plan.steps:
            for bucket, spans in enumerate(line["spans"]):
                for name, (start_s, seconds) in spans.items():
                    yield plan, line, bucket, name, start_s, seconds
