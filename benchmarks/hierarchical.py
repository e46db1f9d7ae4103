"""Two levels compared with flat and with Horovod's dense allreduce, on hosts of two workers.

    python -m benchmarks.hierarchical --json FILE
    python -m benchmarks.hierarchical --json FILE --minutes 20

| case | what it measures |
|---|---|
| `steps` | time through the optimizer, one gradient of 14.7 M (benchmarks/optimizer_worker.py) |
| `bytes` | bytes sent by each host's interface; long cycles keep Horovod's own traffic small |
| `inside` | the reduce inside a host of four workers, against gloo's allreduce over loopback |

`steps` and `bytes` run between two hosts of a network lab (tools/netlab; needs root), with two
workers on each. Each launch verifies all ways before it times them. A figure is the median of three
launches. Finished launches are kept beside the report: the same command continues where it was
stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._launch import Job, Jobs, Launcher, cycle_time
from benchmarks.allreduce import MATRIX, reduced_s
from benchmarks.report import Row, Spread, row_of, write_report

OPTIMIZER, INSIDE = "benchmarks/optimizer_worker.py", "benchmarks/hierarchical_worker.py"
WORKERS, RANKS, INSIDE_RANKS = 2, 4, 4
NUMEL, COLUMNS = MATRIX[0] * MATRIX[1], MATRIX[1]
RATES = ("1gbit", "100mbit")
METHODS, DENSITIES = ("oktopk", "topk"), ("0.01", "0.001")
FLAT = tuple(f"{method}@{density}" for density in DENSITIES for method in METHODS)
WAYS = ("alone", "horovod", *FLAT, *(f"{way},hierarchical" for way in FLAT))
CASES = ("steps", "bytes", "inside")
LONG_CYCLES = cycle_time(300)
BYTES_REPEATS = 5
TIMEOUT_S = 1800.0
LEAST_FASTER = {"100mbit": 1.6, "1gbit": 1.0}
MOST_BYTES, LEAST_OVER_GLOO, MOST_OVER_MEMORY = 0.55, 5.0, 2.0


def jobs_of(options: argparse.Namespace, places: Sequence[Launcher]) -> Iterator[Job]:
    """All launches, case by case."""
    for case in options.cases:
        for at in [Launcher(None)] if case == "inside" else places:
            for launch in range(1, options.launches + 1):
                yield job_of(case, at, launch, options)


def job_of(case: str, at: Launcher, launch: int, options: argparse.Namespace) -> Job:
    """One launch of a case."""
    rows = max(1, round(options.numel / COLUMNS))
    arguments: tuple[str, ...]
    if case == "inside":
        arguments = ("--numel", str(rows * COLUMNS), "--repeats", str(options.repeats))
        return Job(case, at, INSIDE_RANKS, launch, INSIDE, arguments)
    repeats = min(BYTES_REPEATS, options.repeats) if case == "bytes" else options.repeats
    shapes = json.dumps({"shapes": [[rows, COLUMNS]], "ways": WAYS})
    arguments = ("--case", shapes, "--repeats", str(repeats))
    arguments += ("--seconds", f"{options.seconds:g}")
    environment = LONG_CYCLES if case == "bytes" else ()
    return Job(case, at, RANKS, launch, OPTIMIZER, arguments, environment)


Figure = Callable[[Any, str], float]
"""A way's figure from a launch."""


def host_bytes(found: Any, way: str) -> float:
    """Bytes that the busiest host's interface sends for a reduction."""
    return float(max(rank[way] for rank in found["interface_bytes"][::WORKERS]))


def phase_s(phase: str) -> Figure:
    """Rank 0's seconds of a phase; the sum inside a host is in `stage_s`."""
    return lambda found, way: float(found["phases_s"][way][phase])


def spread(
    results: Sequence[Any], figure: Figure, way: str, over: str = "", scale: float = 1.0
) -> Spread:
    """A way's figure over the launches, or its quotient by that of another way."""
    if over:
        return Spread.of(results, lambda r: figure(r, way) / figure(r, over))
    return Spread.of(results, lambda r: figure(r, way), scale)


def way_rows(
    case: str, what: str, unit: str, scale: float, results: Sequence[Any], figure: Figure
) -> Iterator[Row]:
    """Every way compared with Horovod's dense allreduce."""
    dense = spread(results, figure, "horovod", scale=scale)
    for name in WAYS[1:]:
        yield row_of(
            case,
            f"{name}, {what}",
            spread(results, figure, name, scale=scale),
            unit,
            baseline=f"horovod, dense: {dense.middle:.4g} {unit}",
            ratio=spread(results, figure, "horovod", over=name).middle,
        )


def steps_rows(case: str, rate: str, results: Sequence[Any]) -> Iterator[Row]:
    """Milliseconds of a reduction: two levels against flat, and both against dense."""
    goal = LEAST_FASTER.get(rate)
    for way in FLAT:
        faster = spread(results, reduced_s, way, over=f"{way},hierarchical")
        flat = spread(results, reduced_s, way, scale=1e3)
        yield row_of(
            case,
            f"{way}: how much faster two levels are",
            faster,
            "×",
            baseline=f"flat: {flat.middle:.1f} ms",
            goal=None if goal is None else f"at least {goal:g} ×",
            met=None if goal is None else faster.middle >= goal,
        )
    yield from way_rows(case, "through the optimizer", "ms", 1e3, results, reduced_s)
    for name in results[0]["phases_s"]:
        for phase in ("stage_s", "accumulate_select_s"):
            yield row_of(case, f"{name} {phase}", spread(results, phase_s(phase), name, scale=1e3))


def bytes_rows(case: str, results: Sequence[Any]) -> Iterator[Row]:
    """Bytes of a host's interface: two levels over flat."""
    for way in FLAT:
        share = spread(results, host_bytes, f"{way},hierarchical", over=way)
        yield row_of(
            case,
            f"{way}: bytes of two levels over flat",
            share,
            "×",
            goal=f"at most {MOST_BYTES:g} ×",
            met=share.middle <= MOST_BYTES,
        )
    yield from way_rows(case, "sent by the busiest host", "MB", 1e-6, results, host_bytes)


def inside_rows(case: str, results: Sequence[Any]) -> Iterator[Row]:
    """The reduce inside a host, compared with gloo and with a copy in memory."""
    ours = Spread.of(results, lambda r: r["seconds"]["ours"], 1e3)
    gloo = Spread.of(results, lambda r: r["seconds"]["gloo"], 1e3)
    bound = Spread.of(results, lambda r: r["bound_s"], 1e3)
    faster = Spread.of(results, lambda r: r["seconds"]["gloo"] / r["seconds"]["ours"]).middle
    over = Spread.of(results, lambda r: r["seconds"]["ours"] / r["bound_s"])
    yield row_of(
        case,
        "the reduce inside a host",
        ours,
        baseline=f"gloo's allreduce over loopback: {gloo.middle:.1f} ms",
        ratio=faster,
        goal=f"at least {LEAST_OVER_GLOO:g} ×",
        met=faster >= LEAST_OVER_GLOO,
    )
    yield row_of(
        case,
        "the reduce inside a host over what memory allows",
        over,
        "×",
        baseline=f"by a copy of all ranks at once: {bound.middle:.1f} ms",
        goal=f"at most {MOST_OVER_MEMORY:g} ×",
        met=over.middle <= MOST_OVER_MEMORY,
    )


def report(jobs: Jobs, options: argparse.Namespace) -> None:
    """Write the rows of the finished launches."""
    rows: list[Row] = []
    for (name, place, ranks), results in jobs.results().items():
        case = f"{name}, P={ranks}, {place}"
        if name == "steps":
            rows += steps_rows(case, place.partition(",")[0], results)
        else:
            rows += (bytes_rows if name == "bytes" else inside_rows)(case, results)
    write_report("hierarchical", rows, options.json)


def main() -> None:
    """Run missing launches, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--numel", type=int, default=NUMEL, help="approximate n")
    parser.add_argument("--repeats", type=int, default=12, help="most turns of a launch")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for all turns")
    parser.add_argument("--launches", type=int, default=3, help="of each case")
    Launcher.add_arguments(parser, several=True)
    Jobs.add_arguments(parser)
    options = parser.parse_args()
    places: list[Launcher] = []
    if set(options.cases) != {"inside"}:
        options.netlab = options.netlab or RATES
        places = [replace(at, workers=WORKERS) for at in Launcher.each_of(parser, options)]
    jobs = Jobs(options.json, jobs_of(options, places))
    jobs.run(options.minutes, timeout_s=TIMEOUT_S)
    report(jobs, options)
    jobs.exit_where_missing()


if __name__ == "__main__":
    main()
