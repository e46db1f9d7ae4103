"""Time of one reduction, through the optimizer, against what a user would pick instead.

    python -m benchmarks.allreduce --json FILE
    python -m benchmarks.allreduce --json FILE --netlab 1gbit 100mbit --loopback
    python -m benchmarks.allreduce --json FILE --netlab 1gbit --quick --minutes 12

A reduction is what lies between gradients that are ready and the optimizer that has their averages,
through `hvd.DistributedOptimizer`; a backward's own time is measured beside it and subtracted
(benchmarks/optimizer_worker.py). Each launch verifies all ways, then lets them take turns. A figure
is the median of three launches.

| case | what it has |
|---|---|
| `buckets` | one gradient of 14.7 M, as it is cut by default; and in 1, 2 and 4 buckets |
| `vgg16`, `bert-base` | a model's real tensors (bert-base with two ranks only: it needs 17 GB) |
| `wires` | the same gradient over several wires |
| `tensors-200`, `tensors-800` | 1,000 to 10,000 elements each: what they cost the main thread |
| `auto` | exchanges of all algorithms, and what `collective="auto"` picks |
| `bytes` | what Ok-Topk sends, by its own count and by the interface's |

Each launch is a real job under the unmodified horovodrun: on loopback, or with `--netlab RATE` one
rank per host of a network lab whose links are shaped to RATE (tools/netlab; needs root). Launches
that are done are kept beside the report, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._jobs import Job, Jobs, cycle_time
from benchmarks._launch import Launcher
from benchmarks._report import Row, write_report
from benchmarks.allreduce_cases import CASES, case_of, rows_of
from benchmarks.allreduce_sweep import auto_row, plot_sweep, sweep_arguments, sweep_rows
from hvd_sparse.lab.plots import load_pyplot

OPTIMIZER = "benchmarks/optimizer_worker.py"
SWEEP = "benchmarks/sweep_worker.py"
BYTES = "benchmarks/allreduce_worker.py"
BYTES_NUMEL = 14_700_000
TIMEOUT_S = 1200.0
QUICK = ("buckets", "tensors-800", "wires", "vgg16", "tensors-200")
"""In the order of what they tell."""
QUICK_LIMIT_S = 400.0
SLOW_RATE = "100mbit"
EVERY = (*QUICK, "auto", "bert-base", "bytes")
LARGEST_BERT_WORLD = 2


def jobs_of(options: argparse.Namespace, places: list[Launcher]) -> Iterator[Job]:
    """All launches: two ranks first, and case by case.

    A figure of three launches is worth more than three figures of one.
    """
    for ranks in sorted({*options.ranks, *options.sweep_ranks}):
        for case in options.cases:
            for at in places:
                if fits(case, ranks, at, options):
                    for launch in range(1, options.launches + 1):
                        yield job_of(case, at, ranks, launch, options)


def fits(case: str, ranks: int, at: Launcher, options: argparse.Namespace) -> bool:
    """Whether a case says something in a world, and fits into it."""
    if case == "auto":
        return ranks in options.sweep_ranks
    if ranks not in options.ranks or (case == "bert-base" and ranks > LARGEST_BERT_WORLD):
        return False
    if case in ("wires", "bytes"):
        return at.rate is not None
    if case.startswith("tensors-"):
        return at.rate is None
    return at.rate != SLOW_RATE or not options.quick


def job_of(case: str, at: Launcher, ranks: int, launch: int, options: argparse.Namespace) -> Job:
    """One launch of a case."""
    if case == "auto":
        return Job(case, at, ranks, launch, SWEEP, sweep_arguments(options.repeats))
    if case == "bytes":
        # Horovod's threads talk in every cycle of 1 ms. With long cycles an interface sees little
        # but the reduction.
        arguments: tuple[str, ...] = ("--numel", str(BYTES_NUMEL), "--density", "0.01")
        return Job(case, at, ranks, launch, BYTES, arguments, cycle_time(300))
    has_slowest = at.rate is None or ranks <= (os.cpu_count() or 1)
    arguments = ("--case", case_of(case, has_slowest=has_slowest))
    arguments += ("--repeats", str(options.repeats))
    arguments += ("--seconds", f"{options.seconds:g}")
    return Job(case, at, ranks, launch, OPTIMIZER, arguments)


def bytes_rows(case: str, result: dict[str, Any]) -> Iterator[Row]:
    """What each rank sent."""
    for rank, (counted, seen) in enumerate(result["bytes"]):
        yield Row(case, f"oktopk@0.01 bytes sent by rank {rank}", counted, "B")
        share = seen / counted
        yield Row(
            *(case, f"bytes on rank {rank}'s interface over our count", share, "ratio"),
            goal="within 5 %",
            met=0.95 <= share <= 1.05,
        )


def report(jobs: Jobs, options: argparse.Namespace) -> None:
    """The rows of what is done."""
    rows: list[Row] = []
    worlds: dict[str, dict[int, Any]] = {}
    for (case, place, ranks), results in jobs.results().items():
        if case == "auto":
            rows += sweep_rows(ranks, place, results)
            worlds.setdefault(place, {})[ranks] = results[0]
        elif case == "bytes":
            rows += bytes_rows(f"P={ranks}, {place}", results[0])
        else:
            rows += rows_of(case, place, ranks, results)
    for place, found in worlds.items():
        ours = [row for row in rows if place in row.case]
        rows.append(auto_row(ours, place))
        if options.plot:
            plot_sweep(found, place, options.plot.with_name(f"{options.plot.name}-{place}.png"))
    write_report("allreduce", rows, options.json)


def main() -> None:
    """Do what is not done yet, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--cases", nargs="+", choices=(*CASES, "auto", "bytes"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sweep-ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=15, help="turns of a launch, at most")
    parser.add_argument("--seconds", type=float, help="for which they go on; default: 40, quick 15")
    parser.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(QUICK)}, and fewer turns"
    )
    parser.add_argument("--loopback", action="store_true", help="with --netlab: loopback, too")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="draw auto: PREFIX-RATE.png")
    Launcher.add_arguments(parser, several=True)
    parser.add_argument("--launches", type=int, default=3, help="of each case")
    Jobs.add_arguments(parser)
    options = parser.parse_args()
    places = Launcher.each_of(parser, options)
    if options.loopback and options.netlab:
        places.insert(0, Launcher(None))
    if options.plot:
        load_pyplot()
    options.cases = options.cases or (QUICK if options.quick else EVERY)
    options.seconds = options.seconds or (15.0 if options.quick else 40.0)

    jobs = Jobs(options.json, jobs_of(options, places))
    jobs.run(options.minutes, timeout_s=QUICK_LIMIT_S if options.quick else TIMEOUT_S)
    report(jobs, options)
    jobs.exit_where_missing()


if __name__ == "__main__":
    main()
