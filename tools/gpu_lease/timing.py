"""The benchmarks of encoding and decoding, the largest size first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tools.gpu_lease.results import Results

ROOT = Path(__file__).resolve().parents[2]
NUMELS = (2**27, 2**23)
REPETITIONS = 11


def run(results: Results) -> None:
    """A row for each of the benchmarks' rows."""
    for numel in NUMELS:
        for benchmark in ("encode", "decode"):
            with results.guarded(f"{benchmark}, n = {numel}"):
                keep(results, benchmark, numel, "cuda", REPETITIONS)


def keep(results: Results, benchmark: str, numel: int, device: str, repetitions: int) -> None:
    """Run a benchmark in a process of its own; a goal that is missed is no failure here."""
    path = results.folder / f"{benchmark}-{numel}.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", str(path)]
    command += ["--device", device, "--numel", str(numel), "--repetitions", str(repetitions)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        results.row(f"{benchmark}: {row.pop('metric')}", **row)
