"""Launches that are done one by one, each a line in a file, so that a benchmark can be resumed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._launch import Launcher

ENVIRONMENT = {
    # Where ranks share cores, spinning ones hold up an allreduce for half a minute.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
    "OMP_NUM_THREADS": "1",
}


Variables = tuple[tuple[str, str], ...]


def cycle_time(milliseconds: float) -> Variables:
    """The variable by which Horovod's threads wake up as seldom as this; by default, each 1 ms."""
    return (("HOROVOD_CYCLE_TIME", f"{milliseconds:g}"),)


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        case: What is measured.
        at: Where.
        ranks: P.
        launch: Its number among those of the same case; the first is 1.
        script: What every rank runs, as a path in the repository.
        arguments: Of the script.
        environment: Variables of the launch, beside `ENVIRONMENT`.

    With other arguments or variables it is another job.
    """

    case: str
    at: Launcher
    ranks: int
    launch: int
    script: str
    arguments: tuple[str, ...]
    environment: Variables = ()

    @property
    def world(self) -> tuple[str, str, int]:
        """What the launches of one case have in common."""
        return self.case, self.at.place, self.ranks

    @property
    def key(self) -> str:
        command = (self.script, *self.arguments, *self.environment)
        return json.dumps([*self.world, self.launch, *command])

    def __str__(self) -> str:
        return f"{self.case}, P = {self.ranks}, {self.at.place}, launch {self.launch}"


class Jobs:
    """What was asked for, and what is done of it.

    Args:
        path: The report; the lines are beside it, with the suffix `.jsonl`.
        jobs: In the order in which they are run.
    """

    def __init__(self, path: Path, jobs: Iterable[Job]) -> None:
        self.path = path.with_suffix(".jsonl")
        self.jobs = list(jobs)
        self._lines: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._lines[entry["key"]] = entry

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The option that bounds `run`."""
        parser.add_argument(
            "--minutes",
            type=float,
            default=float("inf"),
            help="begin no launch that would probably end later than this; the same command goes "
            "on from there",
        )

    def run(self, minutes: float, *, timeout_s: float) -> None:
        """Do what is not done yet; a launch that fails is told, and tried again next time."""
        start = time.monotonic()
        todo = [job for job in self.jobs if job.key not in self._lines]
        print(f"{len(self.jobs) - len(todo)} of {len(self.jobs)} launches are done", flush=True)
        for number, job in enumerate(todo, 1):
            passed = time.monotonic() - start
            if passed + self._expected_s(job) > 60 * minutes:
                print(f"no time for: {job}", file=sys.stderr, flush=True)
                continue
            print(f"[{number}/{len(todo)}, {passed:.0f} s] {job}", file=sys.stderr, flush=True)
            try:
                with job.at.network(job.ranks):
                    result = job.at.run(
                        job.script,
                        job.ranks,
                        [*job.arguments, *job.at.interface],
                        {**ENVIRONMENT, **dict(job.environment)},
                        timeout_s=timeout_s,
                    )
            except (subprocess.SubprocessError, FileNotFoundError) as error:
                print(f"failed: {job}: {error}", file=sys.stderr, flush=True)
                continue
            self._add(job, result, time.monotonic() - start - passed)

    def results(self, script: str | None = None) -> dict[tuple[str, str, int], list[Any]]:
        """What the launches of each world found, in the order of the jobs."""
        found: dict[tuple[str, str, int], list[Any]] = {}
        for job in self.jobs:
            if job.key in self._lines and script in (None, job.script):
                found.setdefault(job.world, []).append(self._lines[job.key]["result"])
        return found

    @property
    def missing(self) -> list[Job]:
        return [job for job in self.jobs if job.key not in self._lines]

    def exit_where_missing(self, what: str = "launches") -> None:
        """End the program with status 1 where not all is done."""
        if self.missing:
            sys.exit(f"{len(self.missing)} {what} are missing: the same command goes on with them")

    def _expected_s(self, job: Job) -> float:
        """What a launch of the same world took."""
        same = [other for other in self.jobs if other.world == job.world]
        known = [self._lines[o.key]["took_s"] for o in same if o.key in self._lines]
        return max(known, default=0.0)

    def _add(self, job: Job, result: Any, took_s: float) -> None:
        entry = {"key": job.key, "took_s": round(took_s, 1), "result": result}
        self._lines[job.key] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


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
