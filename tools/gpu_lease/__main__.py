"""Runs the phases, each in a process of its own with a time limit; one file comes back."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tools.gpu_lease.phases import CALLS, NAMES, PHASES, Phase, planned, run
from tools.gpu_lease.results import Results, as_text, read

ROOT = Path(__file__).resolve().parents[2]
WHOLE = "whole phase"
"""The row that ends one."""
ARCHIVE = "lease.tar"
"""All that a call has made, and what earlier calls had made in the same work folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where any row failed."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.inside is not None:
        run(options.inside, options.work)
        return 0
    if options.dry_run:
        (options.work / "plan.txt").write_text(planned() + "\n", encoding="utf-8")
        print(planned(), f"files: {pack(options.work, options.out)}", sep="\n")
        return 0
    if options.resume is not None:
        with tarfile.open(options.resume) as archive:
            archive.extractall(options.work, filter="data")
    through = {row["phase"] for row in read(options.work) if row["name"] == WHOLE and row["ok"]}
    through.discard("facts")  # it builds what other phases need, and this machine may be new
    calls = options.call or CALLS
    due = [phase for phase in PHASES if phase.call in calls and phase.name not in through]
    if options.phase:
        due = [phase for phase in PHASES if phase.name in options.phase]
    for call in dict.fromkeys(phase.call for phase in due):
        phases = [phase for phase in due if phase.call == call]
        for phase in phases:
            if not phase.beside:
                launch(phase, options.work, phase.limit_s)
                pack(options.work, options.out)
        with ThreadPoolExecutor(len(PHASES)) as pool:
            beside = [
                pool.submit(launch, phase, options.work, phase.limit_s)
                for phase in phases
                if phase.beside
            ]
            for done in as_completed(beside):
                done.result()
                pack(options.work, options.out)
    rows = read(options.work)
    failed = [row for row in rows if not row["ok"]]
    print("", *map(as_text, rows), sep="\n")
    print(f"\n{len(rows)} rows, {len(failed)} failed", *map(as_text, failed), sep="\n")
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m tools.gpu_lease", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help=f"folder that gets {ARCHIVE}")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "lease", help="its contents")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs no device")
    parser.add_argument("--call", type=int, action="append", choices=CALLS, help="only this one")
    parser.add_argument("--phase", action="append", choices=NAMES, help="only this one, once more")
    parser.add_argument("--resume", type=Path, help="an earlier archive: what it has is not redone")
    parser.add_argument("--inside", choices=NAMES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def pack(work: Path, out: Path) -> str:
    """Write the archive; its name and size."""
    with tarfile.open(out / ARCHIVE, "w") as archive:
        for path in sorted(work.iterdir()):
            archive.add(path, path.name)
    return f"{ARCHIVE}, {(out / ARCHIVE).stat().st_size} bytes"


def launch(phase: Phase, out: Path, limit_s: float) -> None:
    """Run a phase; what it did not end in time, with all that it started, is killed."""
    results = Results(out, phase.name)
    command = [sys.executable, "-m", "tools.gpu_lease", "--out", str(out), "--work", str(out)]
    command += ["--inside", phase.name]
    started_s, log = time.monotonic(), out / f"{phase.name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    seconds = time.monotonic() - started_s
    text = log.read_text(encoding="utf-8", errors="replace")
    print(text[-4000:], end="", flush=True)
    if status is None:
        results.row(WHOLE, ok=False, error=f"not done in {limit_s:.0f} s", seconds=seconds)
    elif status != 0:
        tail = text[-500:]
        results.row(WHOLE, ok=False, error=f"exit {status}: {tail}", seconds=seconds)
    else:
        results.row(WHOLE, seconds=seconds)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started; torchrun gives its workers other sessions."""
    groups = {process.pid}  # which outlives the process
    for pid in started_by(process.pid):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def started_by(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = list[int]()
    with contextlib.suppress(OSError):  # it has just ended
        for each in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, each.read_text().split())
    return [found for child in children for found in (child, *started_by(child))]


if __name__ == "__main__":
    sys.exit(main())
