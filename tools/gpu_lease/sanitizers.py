"""The kernels under compute-sanitizer: memory, races, barriers."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tools.gpu_lease.results import Results

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 9
NUMEL = 5000
"""Enough for every kernel to be launched, and few enough for the tools, which are slow."""


def run(results: Results) -> None:
    """A row for each tool."""
    if shutil.which("compute-sanitizer") is None:
        results.row("skipped", reason="no compute-sanitizer")
        return
    for tool in TOOLS:
        with results.guarded(tool):
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
            smoke = [sys.executable, "-m", "tools.gpu_lease.smoke", str(NUMEL)]
            done = subprocess.run([*command, *smoke], capture_output=True, text=True, check=False)
            told = {} if done.returncode == 0 else {"error": (done.stdout + done.stderr)[-1500:]}
            results.row(tool, told, ok=done.returncode == 0)
