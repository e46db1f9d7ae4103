"""Reads the file that a `Recorder` has written, and checks every line of it.

A recording may come from anywhere. The type and range of every value are checked before it is
drawn, so that nothing else can reach the page.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short_repr
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hvd_sparse.engine.account import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.errors import ConfigError
from hvd_sparse.recording.recorder import VERSION


@dataclass
class Recording:
    """The lines of one run, by kind, in the order in which they were written.

    `run` is the first line, and `torn_lines` counts those that were cut off, by a kill or a full
    disk, while this was the last run of the file.
    """

    run: dict[str, Any]
    plans: list[Plan] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    torn_lines: int = 0

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for plan in self.plans for line in plan.steps]


@dataclass
class Plan:
    """A plan, the number of steps done before it, and the lines written under it."""

    step: int
    buckets: list[dict[str, Any]]
    steps: list[dict[str, Any]] = field(default_factory=list)
    residuals: list[dict[str, Any]] = field(default_factory=list)


def read_runs(path: str | os.PathLike[str]) -> list[Recording]:
    """Read all runs of a file, in the order in which they began.

    Lines that are cut off are skipped and counted. Runs of other versions are skipped.

    Raises:
        ConfigError: A line is invalid, or there is no run; the message names the line.
        OSError: The file cannot be read.
    """
    reader = Reader(os.fspath(path))
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    for number, content in enumerate(text.split("\n"), 1):
        if content.strip():  # empty lines separate runs
            reader.read(content, number)
    if not reader.runs:
        raise ConfigError(reader.refusal or f"{reader.path}:1: an empty file is no recording")
    return list(reader.runs.values())


def chosen_run(runs: list[Recording], number: int | None) -> Recording:
    """The run of a number, from 1; None: the last one. ConfigError if there is no such run."""
    if number is None:
        return runs[-1]
    if not 1 <= number <= len(runs):
        raise ConfigError(f"run must be from 1 to {len(runs)}, got {number}")
    return runs[number - 1]


def spans_of(recording: Recording) -> Iterator[tuple[Plan, dict[str, Any], int, str, float, float]]:
    """All recorded phases: plan, line, bucket, phase, start and seconds."""
    for plan in recording.plans:
        for line in plan.steps:
            for bucket, spans in enumerate(line["spans"]):
                for name, (start_s, seconds) in spans.items():
                    yield plan, line, bucket, name, start_s, seconds


class Reader:
    """Assembles runs, by their ids, from lines; `path` is the file's name, for messages.

    `refusal` is the error to report if the file turns out to hold no run.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.runs: dict[str, Recording] = {}
        self.refusal: str | None = None
        self._last: Recording | None = None
        self._torn_lines = 0  # before the first run

    def read(self, content: str, number: int) -> None:
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
            pass  # a line of a run whose first line was skipped
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
    return (
        line.get("kind") == "run" and holds(LINES["run"]["version"], version) and version != VERSION
    )


def _check_lengths(line: dict[str, Any], keys: Sequence[str], length: int, place: str) -> None:
    for key in keys:
        if len(line[key]) != length:
            raise ConfigError(f"{place}: {key} must have {length} entries, got {len(line[key])}")


# -- what a line must hold -------------------------------------------------------------------------

MOST = 1e50
"""Largest number; sums of many such numbers are still finite."""
MOST_UNIX_S = 253402300799
"""The end of the year 9999, the last that can be shown."""

Number = Annotated[float, Field(strict=True, ge=0, le=MOST, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
AboveZero = Annotated[Count, Field(gt=0)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Phases = dict[Text, Annotated[list[Number], Field(min_length=2, max_length=2)]]
"""Starts and seconds of phases."""


class Bucket(TypedDict):
    names: Annotated[list[Text], Field(min_length=1)]
    numel: Count
    k: Count
    density: Number
    dtype: Text
    compressor: Text
    wire: Text


class Attempt(TypedDict):
    methods: list[Text]
    sparse_tensors: Count
    buckets: Count
    predicted_s: Number
    step_s: Annotated[Number, Field(gt=0)]
    error_s: Number
    steps: Count


number = TypeAdapter(Number)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "run": {
        **{"id": Text, "version": Count, "hvd_sparse": Text, "torch": Text, "host": Text},
        **{"pid": Count, "rank": Count, "world_size": AboveZero, "transport": Text},
        "start_unix_s": Annotated[Number, Field(le=MOST_UNIX_S)],
    },
    "plan": {"id": Text, "step": Count, "buckets": list[Bucket]},
    "steps": {
        **{"id": Text, "step": Count, "steps": AboveZero, "at_s": Number, "seconds": Number},
        **{"collective": list[Text], "threshold": list[Number | None]},
        **{"imbalance": list[Number], "spans": list[Phases], "faults": Count},
        **dict.fromkeys(FIGURES, list[Number]),
    },
    "residual": {"id": Text, "step": Count, "bucket": Count, "norm": Number | None},
    "trial": {
        **{"id": Text, "step": Count, "chosen": Count, "recalled": Flag},
        "tried": Annotated[list[Attempt], Field(min_length=1)],
    },
    "ranks": {
        **{"id": Text, "step": Count, "steps": AboveZero},
        **dict.fromkeys(COMPARED_PHASES, list[Number]),
    },
}
"""What a line of each kind must hold."""
LINES = {
    kind: {key: TypeAdapter(value) for key, value in keys.items()} for kind, keys in KINDS.items()
}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that is not negative."""
    return holds(number, value)


def holds(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except (ValidationError, OverflowError):
        return False
    return True


def check_line(line: Any, place: str) -> dict[str, Any]:
    """Checks what was read at a place, and returns it.

    Raises:
        ConfigError: The line is invalid; the message names the place, the key and the value.
    """
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in LINES:
        raise ConfigError(f"{place}: kind must be one of {', '.join(LINES)}")
    missing = [key for key in LINES[kind] if key not in line]
    if missing:
        raise ConfigError(f"{place}: a {kind!r} line without {', '.join(missing)}")
    for key, adapter in LINES[kind].items():
        if not holds(adapter, line[key]):
            raise ConfigError(
                f"{place}: {key} of a {kind!r} line cannot be {short_repr(line[key])}"
            )
    checked: dict[str, Any] = line
    return checked
