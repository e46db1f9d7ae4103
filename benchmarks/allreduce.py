"""Time of one reduction, from a gradient to the reduced gradient, against dense allreduces.

    python -m benchmarks.allreduce --json FILE
    python -m benchmarks.allreduce --json FILE --netlab 1gbit --ranks 4

Each world is a real job under the unmodified horovodrun: on loopback, or with `--netlab RATE` one
rank per host of a network of namespaces whose links are shaped to RATE (needs root, and the netlab
script through `--netlab-script` or HVD_SPARSE_NETLAB). benchmarks/allreduce_worker.py is what runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._report import Row, write_report

REPOSITORY = Path(__file__).resolve().parents[1]
NUMEL = 14_700_000
GOALS = {  # the factor by which a sparse reduction is to beat the faster dense one
    (None, 2, 0.001): 2.0,
    (None, 4, 0.001): 2.0,
    ("1gbit", 4, 0.001): 15.0,
    ("1gbit", 4, 0.01): 8.0,
}


def horovodrun_command(ranks: int, hosts: str, worker_arguments: list[str]) -> list[str]:
    """A launch of the worker on `ranks` ranks."""
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    worker = str(REPOSITORY / "benchmarks" / "allreduce_worker.py")
    return [
        *(horovodrun, "--gloo", "-np", str(ranks), "-H", hosts),
        *(sys.executable, worker, *worker_arguments),
    ]


def measure(ranks: int, density: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run one world twice, for its times and for its bytes, and return what its rank 0 found.

    Horovod's threads talk in every cycle of 1 ms, work or none. Bytes are counted in a launch with
    long cycles, so that an interface sees little but the reduction.
    """
    times = launch(ranks, density, options, [], {})
    return times | launch(ranks, density, options, ["--count-bytes"], {"HOROVOD_CYCLE_TIME": "300"})


def launch(
    ranks: int,
    density: float,
    options: argparse.Namespace,
    more_arguments: list[str],
    more_environment: dict[str, str],
) -> dict[str, Any]:
    """Run one world, and return what its rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        arguments = [
            *("--out", str(out), "--numel", str(options.numel), "--density", str(density)),
            *("--repeats", str(options.repeats)),
            *more_arguments,
        ]
        if options.netlab:
            hosts = ",".join(f"nl{rank + 1}:1" for rank in range(ranks))
            command = horovodrun_command(ranks, hosts, [*arguments, "--interface", "eth0"])
            command = [options.netlab_script, "exec", "1", *command]
        else:
            command = horovodrun_command(ranks, f"localhost:{ranks}", arguments)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **more_environment}
        print(f"measuring P = {ranks}, density {density} …", file=sys.stderr, flush=True)
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr, timeout=900)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def rows_of(ranks: int, density: float, result: dict[str, Any], netlab: str | None) -> list[Row]:
    """The rows of one world: times against both dense allreduces, and the bytes."""
    case = f"P={ranks} density={density:g} {netlab or 'loopback'}"
    seconds = result["seconds"]
    dense = {name: seconds[name] for name in ("horovod", "gloo")}
    faster = min(dense, key=lambda name: dense[name])
    rows = []
    for name in ("oktopk", "topk_allgather"):
        for baseline, dense_s in dense.items():
            ratio = dense_s / seconds[name]
            is_goal = name == "oktopk" and baseline == faster
            goal = GOALS.get((netlab, ranks, density)) if is_goal else None
            rows.append(
                Row(
                    case=case,
                    metric=f"{name} reduction",
                    value=seconds[name] * 1e3,
                    unit="ms",
                    baseline=f"{baseline} dense allreduce: {dense_s * 1e3:.1f} ms",
                    ratio=ratio,
                    goal=None if goal is None else f"at least {goal:g} × the faster dense one",
                    met=None if goal is None else ratio >= goal,
                )
            )
    for phase, value in result["phases_s"].items():
        rows.append(Row(case=case, metric=f"oktopk {phase}", value=value * 1e3, unit="ms"))
    for rank, (counted, seen) in enumerate(result["bytes"]):
        rows.append(
            Row(case=case, metric=f"oktopk bytes sent by rank {rank}", value=counted, unit="B")
        )
        if seen is not None:
            rows.append(
                Row(
                    case=case,
                    metric=f"oktopk bytes on rank {rank}'s interface over our count",
                    value=seen / counted,
                    unit="ratio",
                    goal="within 5 %",
                    met=0.95 <= seen / counted <= 1.05,
                )
            )
    return rows


def main() -> None:
    """Measure every world asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2 4, on netlab 4")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--netlab", metavar="RATE", help="shape links, as `tc` spells it: 1gbit")
    parser.add_argument("--netlab-script", default=os.environ.get("HVD_SPARSE_NETLAB"))
    options = parser.parse_args()
    if options.netlab and not options.netlab_script:
        parser.error("--netlab needs --netlab-script, or HVD_SPARSE_NETLAB")

    rows = []
    for ranks in options.ranks or ([4] if options.netlab else [2, 4]):
        if options.netlab:
            subprocess.run([options.netlab_script, "up", str(ranks), options.netlab], check=True)
        try:
            for density in options.density:
                result = measure(ranks, density, options)
                rows += rows_of(ranks, density, result, options.netlab)
        finally:
            if options.netlab:
                subprocess.run([options.netlab_script, "down"], check=True)
    write_report("allreduce", rows, options.json)


if __name__ == "__main__":
    main()
