"""Benchmark workers as real jobs under the unmodified horovodrun, on loopback or shaped links.

Each finished launch is a line of a file, so that a stopped benchmark can be resumed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.netlab import Netlab, NetlabError, Network

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""glibc gives each block above 32 MiB back to the system when it is freed. A single gradient of 59
MB then costs 14,000 page faults in every step: 9 ms, or 50 on a virtual machine, which hides what
is measured. Gradients of real models are smaller, and so stay with the process. For all ways."""
ENVIRONMENT = {
    # Where ranks share cores, spinning ones hold up an allreduce for half a minute.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
    "OMP_NUM_THREADS": "1",
}


def keep_memory() -> None:
    """Apply `KEPT_MEMORY` to this process, after glibc has read its environment."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        trim_threshold, mmap_threshold, largest = -1, -3, (1 << 31) - 1
        mallopt(trim_threshold, largest)
        mallopt(mmap_threshold, largest)


@dataclass
class Launcher:
    """Where jobs run.

    Attributes:
        rate: What each host of a network lab sends and receives, as `tc` spells it: 1gbit; None:
            loopback.
        workers: Ranks of each host.
    """

    rate: str | None
    workers: int = 1
    _lab: Network | None = None

    @property
    def place(self) -> str:
        """Name of the network in a report's cases."""
        place = self.rate or "loopback"
        return place if self.workers == 1 else f"{place}, {self.workers} on each host"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
        """Add the option that `of` and `each_of` read."""
        parser.add_argument(
            "--netlab",
            metavar="RATE",
            nargs="+" if several else 1,
            help="run between hosts of a network lab (tools/netlab; needs root and iproute2) with "
            "links of this rate, as `tc` spells it: 1gbit; default: loopback",
        )

    @staticmethod
    def of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Launcher:
        """The launcher for the requested rate; exits with an error if no such lab can be made."""
        return Launcher.each_of(parser, options)[0]

    @staticmethod
    def each_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Launcher]:
        """The launchers for all requested rates."""
        if not options.netlab:
            return [Launcher(None)]
        for rate in options.netlab:
            try:
                with Netlab(hosts=1, rate=rate):
                    pass
            except NetlabError as error:
                parser.error(f"--netlab: {error}")
        return [Launcher(rate) for rate in options.netlab]

    @contextmanager
    def network(self, ranks: int) -> Iterator[None]:
        """Make a lab with hosts for so many ranks, if a rate was requested, for calls of `run`."""
        if self.rate is None:
            yield
            return
        with Netlab(ranks // self.workers, self.rate) as self._lab:
            try:
                yield
            finally:
                self._lab = None

    @property
    def interface(self) -> list[str]:
        """Worker option that names the interface whose bytes are counted."""
        return ["--interface", "eth0"] if self.rate else []

    def run(
        self,
        script: str,
        ranks: int,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        out_option: str = "--out",
        timeout_s: float = 900.0,
    ) -> dict[str, Any]:
        """Run a script of the repository on every rank; returns the JSON that its rank 0 wrote."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(ranks)]
            if self.rate is None:
                command += ["-H", f"localhost:{ranks}"]
            else:
                assert self._lab is not None
                command = self._lab.on("nl1", [*command, "-H", self._lab.slots(self.workers)])
            command += [sys.executable, str(REPOSITORY / script), out_option, str(out), *arguments]
            every = {**os.environ, "PYTHONPATH": str(REPOSITORY), **KEPT_MEMORY}
            every.update(environment or {})
            subprocess.run(command, check=True, env=every, stdout=sys.stderr, timeout=timeout_s)
            result: dict[str, Any] = json.loads(out.read_text())
            return result


Variables = tuple[tuple[str, str], ...]


def cycle_time(milliseconds: float) -> Variables:
    """Environment that makes Horovod's threads wake up every so many milliseconds (default: 1)."""
    return (("HOROVOD_CYCLE_TIME", f"{milliseconds:g}"),)


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        case: What is measured.
        at: Where it runs.
        ranks: P.
        launch: Its number among those of the same case; the first is 1.
        script: What every rank runs, as a path in the repository.
        arguments: Arguments of the script.
        environment: Variables of the launch, in addition to `ENVIRONMENT`.

    Other arguments or variables make another job.
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
        """Key that all launches of one case share."""
        return self.case, self.at.place, self.ranks

    @property
    def key(self) -> str:
        command = (self.script, *self.arguments, *self.environment)
        return json.dumps([*self.world, self.launch, *command])

    def __str__(self) -> str:
        return f"{self.case}, P = {self.ranks}, {self.at.place}, launch {self.launch}"


class Jobs:
    """The requested launches, and the results of those that are done.

    Args:
        path: The report; the lines are beside it, with the suffix `.jsonl`.
        jobs: The jobs, in the order of running.
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
        """Add the option that limits the time of `run`."""
        parser.add_argument(
            "--minutes",
            type=float,
            default=float("inf"),
            help="start no launch that would probably end after this; the same command continues "
            "from there",
        )

    def run(self, minutes: float, *, timeout_s: float) -> None:
        """Run what is missing. A failed launch is reported, and tried again next time."""
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

    def results(self) -> dict[tuple[str, str, int], list[Any]]:
        """The results of each world's launches, in the order of the jobs."""
        found: dict[tuple[str, str, int], list[Any]] = {}
        for job in self.jobs:
            if job.key in self._lines:
                found.setdefault(job.world, []).append(self._lines[job.key]["result"])
        return found

    def by_place(self) -> dict[str, dict[str, list[Any]]]:
        """The results of each case, by the network that it ran on."""
        places: dict[str, dict[str, list[Any]]] = {}
        for (case, place, _), results in self.results().items():
            places.setdefault(place, {})[case] = results
        return places

    @property
    def missing(self) -> list[Job]:
        return [job for job in self.jobs if job.key not in self._lines]

    def exit_where_missing(self, what: str = "launches") -> None:
        """Exit with status 1 if launches are missing."""
        if self.missing:
            sys.exit(f"{len(self.missing)} {what} are missing: the same command goes on with them")

    def _expected_s(self, job: Job) -> float:
        """Longest time of a finished launch of the same world."""
        same = [other for other in self.jobs if other.world == job.world]
        known = [self._lines[o.key]["took_s"] for o in same if o.key in self._lines]
        return max(known, default=0.0)

    def _add(self, job: Job, result: Any, took_s: float) -> None:
        entry = {"key": job.key, "took_s": round(took_s, 1), "result": result}
        self._lines[job.key] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
