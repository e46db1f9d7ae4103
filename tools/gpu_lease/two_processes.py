"""Horovod, built there where it is missing, and two processes that train on one device with AMP."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tools.gpu_lease.results import Results

WHEELS = Path(".whl")
"""Carried there: Horovod's sdist, and what is missing of what builds it."""
BUILT_WITH = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
}
TEST = "tests/cuda/test_shared_device.py"


def run(results: Results) -> None:
    if find_spec("horovod") is None and not built(results):
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-k", "cuda", TEST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = {} if done.returncode == 0 else {"error": (done.stdout + done.stderr)[-1500:]}
    results.row("two processes", told, ok=done.returncode == 0)


def built(results: Results) -> bool:
    """Install Horovod from what was carried."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "c++20"
        compiler.write_text('#!/bin/sh\nexec g++ "$@" -std=c++20\n')  # torch's headers ask for it
        compiler.chmod(0o755)
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation"]
        command += ["--no-deps", "--find-links", str(WHEELS), "horovod"]
        env = {**os.environ, **BUILT_WITH, "CXX": str(compiler)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    told = {} if done.returncode == 0 else {"error": (done.stdout + done.stderr)[-1500:]}
    results.row("build of Horovod", told, ok=done.returncode == 0)
    return done.returncode == 0
