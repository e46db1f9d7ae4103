"""Accuracy against wall-clock time: Fashion-MNIST through Horovod, ours beside the alternatives.

    python -m benchmarks.time_to_accuracy --json FILE --netlab 1gbit --seeds 3 \\
        --plot docs/time_to_accuracy

Every way trains the ResNet of `benchmarks.convergence` for as many steps at the same rates: SGD
with momentum, which ours correct ("global"), and no clipping. A step is timed whole, batch and
update included; what measures the accuracy is not. The convergence tables tell of more compressors,
and of P in threads; this one of real processes, of a planner's training and of time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._launch import Job, Jobs, Launcher
from benchmarks.report import Row, Spread, row_of, write_report
from benchmarks.time_to_loss import plot_curves
from benchmarks.ways import check_names

WORKER = "benchmarks/time_to_accuracy_worker.py"
MODEL = "Fashion-MNIST, ResNet of 78,000 parameters"
DENSE = "horovod"
WAYS = (DENSE, "ddp", "powersgd-2", "topk@0.01", "planned@0.01")
Found = Mapping[str, Sequence[Any]]
"""The results of each way, seed by seed."""


def rows_of(place: str, ranks: int, found: Found) -> Iterator[Row]:
    """Accuracy, seconds and megabytes of every way, beside plain Horovod's."""
    case = f"{MODEL}; {place}, P={ranks}"
    dense = {
        "accuracy": Spread.of(found[DENSE], lambda result: result["curve"][-1][1]).middle,
        "seconds": Spread.of(found[DENSE], lambda result: result["curve"][-1][0]).middle,
    }
    for way, results in found.items():
        accuracy = Spread.of(results, lambda result: result["curve"][-1][1])
        seconds = Spread.of(results, lambda result: result["curve"][-1][0])
        compared = {} if way == DENSE else {"baseline": f"{DENSE}: {dense['accuracy']:.2f} %"}
        yield row_of(case, f"accuracy in the end, {way}", accuracy, "%", **compared)
        compared = {"baseline": f"{DENSE}: {dense['seconds']:.0f} s"} if compared else {}
        ratio = {"ratio": dense["seconds"] / seconds.middle} if compared else {}
        yield row_of(case, f"time of the training, {way}", seconds, "s", **compared, **ratio)
        sent = Spread.of(results, lambda result: result["mbytes"])
        yield row_of(case, f"sent by a worker, {way}", sent, "MB")


def main() -> None:
    """Run missing trainings, print the table, write the JSON, draw the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--ways", nargs="+", default=WAYS, help="see benchmarks/ways.py")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="of a training; default: the task's")
    parser.add_argument("--points", type=int, default=15, help="of each curve")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="PREFIX-RATE.png")
    Launcher.add_arguments(parser, several=True)
    Jobs.add_arguments(parser)
    options = parser.parse_args()
    if wrong := check_names(options.ways):
        parser.error(f"--ways: {wrong}")
    if options.ways[0] != DENSE:
        parser.error(f"--ways: {DENSE} must be the first; the others are compared with it")
    arguments = ["--points", str(options.points)]
    if options.steps:
        arguments += ["--steps", str(options.steps)]
    jobs = Jobs(
        options.json,
        [
            Job(
                *(way, at, options.ranks, seed, WORKER),
                ("--way", way, "--seed", str(seed), *arguments),
            )
            for at in Launcher.each_of(parser, options)
            for seed in range(10, 10 + options.seeds)
            for way in options.ways
        ],
    )
    jobs.run(options.minutes, timeout_s=1800.0)
    places = jobs.by_place()
    rows = [row for place, found in places.items() for row in rows_of(place, options.ranks, found)]
    if options.plot:
        for place, found in places.items():
            path = options.plot.with_name(f"{options.plot.name}-{place}.png")
            title = f"{MODEL}; {place}, {options.ranks} workers"
            plot_curves(found, path, title, "test accuracy, %", ylim=(75, 92))
    write_report("time_to_accuracy", rows, options.json)
    jobs.exit_where_missing("trainings")


if __name__ == "__main__":
    main()
