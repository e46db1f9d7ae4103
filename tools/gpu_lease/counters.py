"""Nsight Compute's counters of the hot kernels."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections import defaultdict

from tools.gpu_lease.results import Results

METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "smsp__inst_executed.sum": "warp_instructions",
    "dram__bytes.sum": "dram_bytes",
    "launch__registers_per_thread": "registers",
}
"""What is asked for, and what a row calls it; units stand beside the values."""
COMMAND = (
    *("ncu", "--csv", "--page", "raw", "--clock-control", "none"),
    *("--nvtx", "--nvtx-include", "hot/", "--metrics", ",".join(METRICS)),
)


def run(results: Results) -> None:
    """A row for each kernel."""
    if shutil.which("ncu") is None:
        results.row("skipped", reason="no ncu")
        return
    command = [*COMMAND, sys.executable, "-m", "tools.gpu_lease.hot"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = kernels_of(done.stdout)
    if done.returncode != 0 or not rows:
        results.row("ncu", ok=False, error=(done.stderr + done.stdout)[-1500:])
    for kernel, values in rows.items():
        results.row(kernel, values)


def kernels_of(output: str) -> dict[str, dict[str, str]]:
    """Values by kernel and metric, of the CSV among what ncu prints: names, units, values."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    if not lines:
        return {}
    names, units, *launches = csv.reader(lines)
    rows: dict[str, dict[str, str]] = defaultdict(dict)
    for launch in launches:
        told = dict(zip(names, zip(launch, units, strict=True), strict=True))
        for metric, name in METRICS.items():
            if metric in told:
                rows[told["Kernel Name"][0]][name] = " ".join(told[metric]).strip()
    return rows
