"""The kernels under compute-sanitizer: memory, races, barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tools.gpu_lease.results import Results

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
"""Each is a phase."""
FOUND = 9
NUMEL = 5000
"""Enough for every kernel to be launched, and few enough for the tools, which are slow."""


def run(results: Results) -> None:
    """A row for the tool whose phase this is."""
    if shutil.which("compute-sanitizer") is None:
        results.row("skipped", reason="no compute-sanitizer")
        return
    tool = results.phase
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    smoke = [sys.executable, "-m", "tools.gpu_lease.smoke", str(NUMEL)]
    # Else torch's allocator keeps blocks, of which the tool sees no end and no begin.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, *smoke], capture_output=True, text=True, check=False, env=env)
    told = {} if done.returncode == 0 else {"error": (done.stdout + done.stderr)[-1500:]}
    results.row(tool, told, ok=done.returncode == 0)
