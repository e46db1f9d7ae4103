"""What machine this is: versions, the speed of a copy, and what a launch costs."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from tools.gpu_lease.results import Results
from tools.netlab import missing as missing_for_netlab

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "numpy",
    "psutil",
    "pytest",
    "hypothesis",
    "pytest-xdist",
)
PROGRAMS = ("nvcc", "ncu", "compute-sanitizer", "cuobjdump", "g++")
COPY_NUMEL = 2**29
LAUNCHES = 200


def run(results: Results) -> None:
    results.row(
        "machine", python=platform.python_version(), cores=os.cpu_count(), system=platform.release()
    )
    results.row("packages", {name: version_of(name) for name in PACKAGES})
    results.row("programs", {name: shutil.which(name) or "none" for name in PROGRAMS})
    results.row("network", missing=missing_for_netlab())
    with results.guarded("native library"):
        results.row("native library", backend=native_backend(results))
    if not torch.cuda.is_available():
        results.row("device", device="none")
        return
    properties = torch.cuda.get_device_properties(0)
    results.row(
        "device",
        device=properties.name,
        processors=properties.multi_processor_count,
        memory_gib=properties.total_memory / 2**30,
        capability=f"{properties.major}.{properties.minor}",
        cuda=torch.version.cuda,
    )
    with results.guarded("copy"):
        from tools.kernels import copy_speed  # imports ops, once the library is built

        speed = copy_speed(COPY_NUMEL, torch.device("cuda", 0), 10)
        results.row("copy", terabytes_per_s=speed / 1e12)
    with results.guarded("launch"):
        results.row("launch", microseconds=launch_s() * 1e6, waited_for_us=wait_s() * 1e6)


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def native_backend(results: Results) -> str:
    """What stands behind the operations on the CPU; the library is built where it is missing."""
    if not any((ROOT / "hvd_sparse").glob("_native*.so")):
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        results.row("build of the library", ok=done.returncode == 0, said=done.stderr[-500:])
    from hvd_sparse import ops

    return ops.backend()


def launch_s() -> float:
    """Host seconds of a launch that nothing waits for."""
    x = torch.zeros(1, device="cuda")
    for _ in range(20):
        x.add_(1)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1)
    spent_s = time.perf_counter() - started_s
    torch.cuda.synchronize()
    return spent_s / LAUNCHES


def wait_s() -> float:
    """Host seconds of a launch and the wait for its result."""
    x, times_s = torch.zeros(1, device="cuda"), []
    for _ in range(LAUNCHES):
        started_s = time.perf_counter()
        x.add_(1).item()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)
