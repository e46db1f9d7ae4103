"""Time of one reduction, from a gradient to the reduced gradient, against dense allreduces.

    python -m benchmarks.allreduce --json FILE
    python -m benchmarks.allreduce --json FILE --netlab 1gbit --ranks 4

Each world is a real job under the unmodified horovodrun: on loopback, or with `--netlab RATE` one
rank per host of a network lab whose links are shaped to RATE (tools/netlab; needs root).
benchmarks/allreduce_worker.py is what runs.

Then a sweep over ranks and densities compares the exchanges of all algorithms with one another, and
with what "auto" picks (benchmarks/allreduce_sweep.py); `--plot FILE` draws it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks._launch import Launcher
from benchmarks._report import Row, write_report
from benchmarks.allreduce_sweep import plot_sweep, sweep, sweep_rows
from hvd_sparse.simulator.plots import load_pyplot

WORKER = "benchmarks/allreduce_worker.py"
NUMEL = 14_700_000
SWEEP_NUMEL, SWEEP_DENSITIES = 1 << 22, [0.0001, 0.001, 0.01, 0.05]
GOALS = {  # the factor by which a sparse reduction is to beat the faster dense one
    (None, 2, 0.001): 2.0,
    (None, 4, 0.001): 2.0,
    ("1gbit", 4, 0.001): 15.0,
    ("1gbit", 4, 0.01): 8.0,
}


def measure(
    ranks: int, density: float, options: argparse.Namespace, at: Launcher
) -> dict[str, Any]:
    """Run one world twice, for its times and for its bytes, and return what its rank 0 found.

    Horovod's threads talk in every cycle of 1 ms, work or none. Bytes are counted in a launch with
    long cycles, so that an interface sees little but the reduction.
    """
    print(f"measuring P = {ranks}, density {density} …", file=sys.stderr, flush=True)
    arguments = ["--numel", str(options.numel), "--density", str(density)]
    arguments += ["--repeats", str(options.repeats), *at.interface]
    times = at.run(WORKER, ranks, arguments)
    bytes_ = at.run(
        WORKER,
        ranks,
        [*arguments, "--count-bytes"],
        {"HOROVOD_CYCLE_TIME": "300"},
    )
    return times | bytes_


def rows_of(ranks: int, density: float, result: dict[str, Any], at: Launcher) -> list[Row]:
    """The rows of one world: times against both dense allreduces, and the bytes."""
    case = f"P={ranks} density={density:g} {at.place}"
    seconds = result["seconds"]
    dense = {name: seconds[name] for name in ("horovod", "gloo")}
    faster = min(dense, key=lambda name: dense[name])
    rows = []
    for name in ("oktopk", "topk_allgather"):
        for baseline, dense_s in dense.items():
            ratio = dense_s / seconds[name]
            is_goal = name == "oktopk" and baseline == faster
            goal = GOALS.get((at.rate, ranks, density)) if is_goal else None
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
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2 4, with --netlab 4")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep-ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--sweep-density", type=float, nargs="+", default=SWEEP_DENSITIES)
    parser.add_argument("--sweep-numel", type=int, default=SWEEP_NUMEL)
    parser.add_argument("--plot", type=Path, help="draw the sweep, like SparCML's figure 3")
    Launcher.add_arguments(parser)
    options = parser.parse_args()
    at = Launcher.of(parser, options)
    if options.plot:
        load_pyplot()

    rows = []
    for ranks in options.ranks or ([4] if at.rate else [2, 4]):
        with at.network(ranks):
            for density in options.density:
                rows += rows_of(ranks, density, measure(ranks, density, options, at), at)
    worlds = {}
    for ranks in options.sweep_ranks:
        with at.network(ranks):
            worlds[ranks] = sweep(
                *(ranks, options.sweep_numel, options.sweep_density, options.repeats, at)
            )
        rows += sweep_rows(ranks, worlds[ranks], options.sweep_numel, at)
    if options.plot and worlds:
        plot_sweep(worlds, options.sweep_numel, at, options.plot)
    write_report("allreduce", rows, options.json)


if __name__ == "__main__":
    main()
