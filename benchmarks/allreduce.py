"""Time of one reduction, through the optimizer, against what a user would pick instead.

    python -m benchmarks.allreduce --json FILE
    python -m benchmarks.allreduce --json FILE --netlab 1gbit 100mbit --loopback
    python -m benchmarks.allreduce --json FILE --netlab 1gbit --quick --minutes 12

A reduction through `hvd.DistributedOptimizer` starts when the gradients are ready and ends when the
optimizer has their averages. The time of backward alone is measured and subtracted
(benchmarks/optimizer_worker.py). Each launch verifies all ways, then lets them take turns. A figure
is the median of three launches.

| case | what it measures |
|---|---|
| `buckets` | one gradient of 14.7 M in the default buckets, and in 1, 2 and 4 buckets |
| `vgg16`, `bert-base` | a model's real tensors (bert-base with two ranks only: it needs 17 GB) |
| `wires` | the same gradient over several wires |
| `tensors-200`, `tensors-800` | tensors of 1,000 to 10,000 elements: the main thread's time |
| `auto` | exchanges of all algorithms, and what `collective="auto"` picks |

Each launch is a real job under the unmodified horovodrun: on loopback, or with `--netlab RATE` one
rank per host of a network lab whose links are shaped to RATE (tools/netlab; needs root). Finished
launches are kept beside the report: the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from benchmarks._launch import Job, Jobs, Launcher
from benchmarks.allreduce_sweep import auto_row, plot_sweep, sweep_arguments, sweep_rows
from benchmarks.models import shapes_of
from benchmarks.patterns import PATTERNS
from benchmarks.report import Row, Spread, row_of, write_report
from hvd_sparse.lab.plots import load_pyplot

OPTIMIZER = "benchmarks/optimizer_worker.py"
SWEEP = "benchmarks/sweep_worker.py"
TIMEOUT_S = 1200.0
QUICK = ("buckets", "tensors-800", "wires", "vgg16", "tensors-200")
"""The most informative first."""
QUICK_LIMIT_S = 400.0
SLOW_RATE = "100mbit"
EVERY = (*QUICK, "auto", "bert-base")
LARGEST_BERT_WORLD = 2
Found = dict[str, Any]
"""Rank 0's results of one launch: see benchmarks/optimizer_worker.py."""

MATRIX = (4200, 3500)
"""One gradient of 14.7 M; PowerSGD compresses matrices only."""
OPPONENTS = ("horovod", "horovod-fp16", "gloo", "ddp-bf16", "powersgd-2")
SLOWEST = "horovod-fp16"
"""Left out where 4 spinning workers share 2 cores and a link: its steps take 8 s there."""
PLAIN_DENSE = ("horovod", "gloo")
DENSITIES = ("0.001", "0.01")
WIRES = ("float32", "float32+gap", "float16+gap", "auto")
CASES = ("buckets", "vgg16", "bert-base", "wires", "tensors-200", "tensors-800", "tiny")
LEAST_FACTORS = {  # over the faster of plain Horovod and torch's gloo, for Ok-Topk by default
    ("loopback", 2, "0.001"): 2.6,
    ("loopback", 2, "0.01"): 2.2,
    ("loopback", 4, "0.001"): 3.0,
    ("loopback", 4, "0.01"): 2.4,
    ("1gbit", 2, "0.001"): 27.0,
    ("1gbit", 2, "0.01"): 17.0,
    ("1gbit", 4, "0.001"): 20.0,
    ("1gbit", 4, "0.01"): 12.0,
}
MOST_FOR_FOUR_BUCKETS = 1.1
MOST_FOR_SMALL_TENSORS = 1.5
LEAST_FOR_WIRES = {
    "float16+gap": {"1gbit": 1.0, "100mbit": 1.8},
    "auto": {"10gbit": 0.97, "1gbit": 0.97, "100mbit": 0.97},
}


def jobs_of(options: argparse.Namespace, places: list[Launcher]) -> Iterator[Job]:
    """All launches: two ranks first, then case by case.

    A figure of three launches is worth more than three figures of one.
    """
    for ranks in sorted({*options.ranks, *options.sweep_ranks}):
        for case in options.cases:
            for at in places:
                if fits(case, ranks, at, options):
                    for launch in range(1, options.launches + 1):
                        yield job_of(case, at, ranks, launch, options)


def fits(case: str, ranks: int, at: Launcher, options: argparse.Namespace) -> bool:
    """Whether a case is meaningful in a world, and fits into its memory."""
    if case == "auto":
        return ranks in options.sweep_ranks
    if ranks not in options.ranks or (case == "bert-base" and ranks > LARGEST_BERT_WORLD):
        return False
    if case == "wires":
        return at.rate is not None
    if case.startswith("tensors-"):
        return at.rate is None
    return at.rate != SLOW_RATE or not options.quick


def job_of(case: str, at: Launcher, ranks: int, launch: int, options: argparse.Namespace) -> Job:
    """One launch of a case."""
    if case == "auto":
        return Job(
            case, at, ranks, launch, SWEEP, sweep_arguments(options.repeats, options.pattern)
        )
    has_slowest = at.rate is None or ranks <= (os.cpu_count() or 1)
    arguments: tuple[str, ...] = ("--case", case_of(case, has_slowest=has_slowest))
    arguments += ("--repeats", str(options.repeats))
    arguments += ("--seconds", f"{options.seconds:g}")
    return Job(case, at, ranks, launch, OPTIMIZER, arguments)


def case_of(name: str, *, has_slowest: bool = True) -> str:
    """The worker's `--case`."""
    opponents = [way for way in OPPONENTS if has_slowest or way != SLOWEST]
    ours = [f"{method}@{density}" for density in DENSITIES for method in ("oktopk", "topk")]
    shapes: Sequence[Sequence[int]] = [MATRIX]
    ways = ["alone", *opponents, *ours]
    if name == "buckets":
        ways += [f"oktopk@{density}#{buckets}" for density in DENSITIES for buckets in (1, 2, 4)]
    elif name == "wires":
        ways = [f"oktopk@{density}/{wire}" for density in DENSITIES for wire in WIRES]
        ways = ["alone", "horovod", *ways]
    elif name.startswith("tensors-"):
        draw, count = Random(0), int(name.partition("-")[2])
        shapes = [[draw.randint(1000, 10_000)] for _ in range(count)]
        ways = ["alone", "horovod", "topk@0.01", "oktopk@0.01"]
    else:
        shapes = shapes_of(name)
    if name == "bert-base":  # what fits into memory
        ways = ["alone", *opponents, *(f"oktopk@{density}" for density in DENSITIES)]
    return json.dumps({"shapes": shapes, "ways": ways})


def rows_of(name: str, place: str, ranks: int, results: list[Found]) -> Iterator[Row]:
    """The rows of one world: every way, and the goals."""
    case = f"{name}, P={ranks}, {place}"
    if ranks > 2:
        case += ", 2 cores"
    for way in results[0]["seconds"]:
        yield way_row(case, way, place, ranks, results)
    if name == "buckets":
        for density in DENSITIES:
            yield from bucket_rows(case, f"oktopk@{density}", results)
    if name == "wires":
        yield from wire_rows(case, place, results)
    if name.startswith("tensors-"):
        yield from thread_rows(case, results)


def reduced_s(found: Found, way: str) -> float:
    """Seconds from ready gradients to averages in the optimizer."""
    seconds = found["seconds"]
    return float(seconds[way] - seconds["alone"]) if way != "alone" else float(seconds[way])


def dense_s(found: Found) -> float:
    """The same for the faster plain dense way."""
    return min(reduced_s(found, way) for way in PLAIN_DENSE if way in found["seconds"])


def way_row(case: str, way: str, place: str, ranks: int, results: list[Found]) -> Row:
    ms = Spread.of(results, lambda found: reduced_s(found, way), 1e3)
    if way == "alone":
        return row_of(case, "backward alone, subtracted from the others", ms)
    dense = Spread.of(results, dense_s, 1e3)
    names = " and ".join(name for name in PLAIN_DENSE if name in results[0]["seconds"])
    factor = Spread.of(results, lambda found: dense_s(found) / reduced_s(found, way)).middle
    method, _, density = way.partition("@")
    is_goal = case.startswith("buckets") and method == "oktopk"
    goal = LEAST_FACTORS.get((place, ranks, density)) if is_goal else None
    return row_of(
        case,
        f"{way}, through the optimizer",
        ms,
        baseline=f"dense, the faster of {names}: {dense.middle:.1f} ms",
        ratio=factor,
        goal=None if goal is None else f"at least {goal:g} ×",
        met=None if goal is None else factor >= goal,
    )


def bucket_rows(case: str, way: str, results: list[Found]) -> Iterator[Row]:
    """Several buckets compared with one."""
    single = f"{way}#1"
    one = Spread.of(results, lambda found: reduced_s(found, single), 1e3)
    for buckets in (2, 4):
        name = f"{way}#{buckets}"
        share = Spread.of(results, lambda r, n=name: reduced_s(r, n) / reduced_s(r, single))  # type: ignore[misc]
        yield row_of(
            case,
            f"{way} in {buckets} buckets over one bucket",
            share,
            "×",
            baseline=f"one bucket: {one.middle:.1f} ms",
            goal=f"at most {MOST_FOR_FOUR_BUCKETS:g} ×",
            met=share.middle <= MOST_FOR_FOUR_BUCKETS,
        )


def wire_rows(case: str, place: str, results: list[Found]) -> Iterator[Row]:
    """Shorter wires compared with `float32`."""
    for density, wire in product(DENSITIES, LEAST_FOR_WIRES):
        goal = LEAST_FOR_WIRES[wire].get(place)
        plain, short = (f"oktopk@{density}/{each}" for each in ("float32", wire))
        factor = Spread.of(
            results,
            lambda r, p=plain, s=short: reduced_s(r, p) / reduced_s(r, s),  # type: ignore[misc]
        )
        yield row_of(
            case,
            f"how much faster {short} is than float32",
            factor,
            "×",
            goal=None if goal is None else f"at least {goal:g} ×",
            met=None if goal is None else factor.middle >= goal,
        )


def thread_rows(case: str, results: list[Found]) -> Iterator[Row]:
    """Time of the training thread with many small tensors, including Horovod's spinning."""

    def own(found: Found, way: str) -> float:
        seconds = found["thread_seconds"]
        return float(seconds[way] - seconds["alone"])

    plain = Spread.of(results, lambda found: own(found, "horovod"), 1e3)
    for way in results[0]["thread_seconds"]:
        if way in ("alone", "horovod"):
            continue
        share = Spread.of(results, lambda r, w=way: own(r, w) / own(r, "horovod"))  # type: ignore[misc]
        yield row_of(
            case,
            f"{way}, main thread's own time over plain Horovod's",
            share,
            "×",
            baseline=f"plain Horovod: {plain.middle:.2f} ms",
            goal=f"at most {MOST_FOR_SMALL_TENSORS:g} ×",
            met=share.middle <= MOST_FOR_SMALL_TENSORS,
        )


def report(jobs: Jobs, options: argparse.Namespace) -> None:
    """Write the rows of the finished launches."""
    rows: list[Row] = []
    worlds: dict[str, dict[int, Any]] = {}
    for (case, place, ranks), results in jobs.results().items():
        if case == "auto":
            rows += sweep_rows(ranks, place, results)
            worlds.setdefault(place, {})[ranks] = results[0]
        else:
            rows += rows_of(case, place, ranks, results)
    for place, found in worlds.items():
        ours = [row for row in rows if place in row.case]
        rows.append(auto_row(ours, place))
        if options.plot:
            plot_sweep(found, place, options.plot.with_name(f"{options.plot.name}-{place}.png"))
    write_report("allreduce", rows, options.json)


def main() -> None:
    """Run missing launches, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--cases", nargs="+", choices=(*CASES, "auto"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sweep-ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--pattern", choices=PATTERNS, default="uniform", help="where the entries of auto lie"
    )
    parser.add_argument("--repeats", type=int, default=15, help="most turns of a launch")
    parser.add_argument("--seconds", type=float, help="limit for all turns; default: 40, quick 15")
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
