"""Runs the phases, each in a process of its own with a time limit."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_lease.phases import NAMES, PHASES, Phase, run
from tools.gpu_lease.results import Results, as_text, read

TOTAL_S = 540.0
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where any row failed."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside is not None:
        run(options.inside, options.out)
        return 0
    if options.total_s <= 0:
        raise SystemExit(f"gpu_lease: --total-s must be above 0, got {options.total_s:g}")
    deadline_s = time.monotonic() + options.total_s
    wanted = [phase for phase in PHASES if not options.phase or phase.name in options.phase]
    for phase in wanted:
        limit_s = min(phase.limit_s, deadline_s - time.monotonic())
        launch(phase, options.out, limit_s)
    rows = read(options.out)
    failed = [row for row in rows if not row["ok"]]
    print(f"\n{len(rows)} rows, {len(failed)} failed", *map(as_text, failed), sep="\n")
    return 1 if failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m tools.gpu_lease", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--phase", action="append", choices=NAMES, help="only this one; repeatable")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="limit for all phases")
    parser.add_argument("--inside", choices=NAMES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def launch(phase: Phase, out: Path, limit_s: float) -> None:
    """Run a phase; what it did not end in time, with all that it started, is killed."""
    results = Results(out, phase.name)
    if limit_s <= 0:
        results.row("whole phase", ok=False, error="no time was left for it")
        return
    command = [sys.executable, "-m", "tools.gpu_lease", "--out", str(out), "--inside", phase.name]
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
        results.row("whole phase", ok=False, error=f"not done in {limit_s:.0f} s", seconds=seconds)
    elif status != 0:
        tail = text[-500:]
        results.row("whole phase", ok=False, error=f"exit {status}: {tail}", seconds=seconds)
    else:
        results.row("whole phase", seconds=seconds)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
