"""What only a CUDA device can show: `make gpu-check` runs this in .venv.

Installs the CuPy that fits the installed torch, runs the tests that need a device, and writes the
benchmarks' results for it. Takes some minutes.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

RESULTS = Path("benchmarks/results")
BENCHMARKS = ("encode", "decode")


def main() -> None:
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise SystemExit(f"gpu-check: torch {torch.__version__} finds no CUDA device")
    run_python = [sys.executable, "-m"]
    if find_spec("cupy") is None:
        extra = f"cuda{torch.version.cuda.partition('.')[0]}"
        subprocess.run([*run_python, "pip", "install", "-q", f".[{extra}]"], check=True)
    tests = subprocess.run([*run_python, "pytest", "-m", "gpu", *sys.argv[1:]], check=False)
    if tests.returncode != 0:
        raise SystemExit("gpu-check: tests failed, so nothing was timed")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in BENCHMARKS:
        command = [*run_python, f"benchmarks.{name}", "--device", "cuda"]
        subprocess.run([*command, "--json", str(RESULTS / f"{name}-cuda.json")], check=True)


if __name__ == "__main__":
    main()
