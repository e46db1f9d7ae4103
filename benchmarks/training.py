"""Steps of real training, against what a user would pick instead.

    python -m benchmarks.training --json FILE --netlab 1gbit 100mbit --loopback --plot docs/training
    python -m benchmarks.training --json FILE --netlab 1gbit 100mbit --quick --minutes 17

Models with their real tensors (benchmarks/models.py) are trained by plain SGD in all ways
(benchmarks/ways.py) in one launch, in which the ways take turns of some steps. A figure is the
median of three launches. "Overhead" is what a step takes beyond computing alone. Bytes are those
that a host's interface sent. Of ours, it also tells how much of the exchanges was over when
backward was.

Each launch is a real job under the unmodified horovodrun: on loopback, or with `--netlab RATE` one
rank per host of a network lab whose links are shaped to RATE (tools/netlab; needs root). Launches
that are done are kept beside the report, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks._jobs import Job, Jobs, cycle_time
from benchmarks._launch import Launcher
from benchmarks._report import write_report
from benchmarks.models import MODELS
from benchmarks.training_rows import MORE, goal_rows, plot_steps, step_rows
from benchmarks.ways import check_names
from hvd_sparse.lab.plots import load_pyplot

WORKER = "benchmarks/training_worker.py"
TIMEOUT_S, QUICK_LIMIT_S = 3600.0, 600.0
FIRST_MODELS = ("transformer35", "lstm", "vgg16")
MODELS_AT_1GBIT = (*FIRST_MODELS, "resnet50", "recommendation", "extreme")
FEW_WAYS = (
    *("horovod", "horovod-fp16", "ddp-bf16", "powersgd-2"),
    *("oktopk@0.01", "topk@0.01", "oktopk@0.001", "oktopk@0.01/float16+gap"),
)
"""Where a dense step takes seconds."""
QUICK_WAYS = (*FEW_WAYS, "ddp", "asleep", "planned@0.01")
MORE_WAYS = (
    *("horovod", "ddp-fp16", "powersgd-1", "powersgd-2", "powersgd-4"),
    *("dgc@0.01", "dgc@0.001", "topk@0.001", "topk@0.01/float16+gap", "planned@0.001"),
)
"""In launches of their own: all ways at a time do not fit into the memory of one machine."""
SPARSE_GRADIENT_WAYS = ("horovod", "ddp", "asleep", "oktopk@0.01", "topk@0.01")
"""Hooks, fp16 and the planner take no sparse gradients."""
LARGE_MODELS = ("extreme", "bert-base")
LARGE_MODEL_WAYS = ("horovod", "powersgd-2", "oktopk@0.01")
LARGEST_FULL_WORLD = 2
SLOW_RATES = ("10mbit", "100mbit")


def ways_of(
    model: str, at: Launcher, ranks: int, options: argparse.Namespace
) -> dict[str, tuple[str, ...]]:
    """What is compared on one model in one world: the ways of a launch, by the case's name."""
    if options.ways:
        return {model: tuple(options.ways)}
    if model == "recommendation":
        return {model: SPARSE_GRADIENT_WAYS}
    if model in LARGE_MODELS:
        return {model: LARGE_MODEL_WAYS}
    if at.rate in SLOW_RATES or ranks > LARGEST_FULL_WORLD:
        return {model: FEW_WAYS}
    if options.quick:
        return {model: QUICK_WAYS}
    return {model: QUICK_WAYS, f"{model}{MORE}": MORE_WAYS}


def models_of(at: Launcher, options: argparse.Namespace) -> tuple[str, ...]:
    """What is trained in one place, in the order of what it tells."""
    if options.models:
        return tuple(options.models)
    if options.quick:
        return ("vgg16",) if at.rate in SLOW_RATES else FIRST_MODELS
    return MODELS_AT_1GBIT if at.rate == "1gbit" else FIRST_MODELS


def jobs_of(options: argparse.Namespace, places: list[Launcher]) -> Iterator[Job]:
    """All launches, case by case."""
    environment = () if options.cycle_time_ms is None else cycle_time(options.cycle_time_ms)
    for ranks in options.ranks:
        for at in places:
            for model in models_of(at, options):
                for case, ways in ways_of(model, at, ranks, options).items():
                    arguments: tuple[str, ...] = ("--model", model)
                    arguments += ("--turns", str(options.turns))
                    arguments += ("--turn-seconds", f"{options.turn_seconds:g}")
                    arguments += ("--seconds", f"{options.seconds:g}", "--ways", *ways)
                    for launch in range(1, options.launches + 1):
                        yield Job(case, at, ranks, launch, WORKER, arguments, environment)


def report(jobs: Jobs, options: argparse.Namespace) -> None:
    """The rows of what is done, and its plots."""
    found = jobs.results()
    rows = [row for world, results in found.items() for row in goal_rows(*world, results)]
    rows += [row for world, results in found.items() for row in step_rows(*world, results)]
    if options.plot:
        for place, ranks in sorted({(place, ranks) for _, place, ranks in found}):
            here = {m: r for (m, p, n), r in found.items() if (p, n) == (place, ranks)}
            path = options.plot.with_name(f"{options.plot.name}-{place}-{ranks}ranks.png")
            plot_steps(here, f"{place}, {ranks} workers", path)
    write_report("training", rows, options.json)


def main() -> None:
    """Do what is not done yet, print the table, write the JSON, draw the plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: by the network")
    parser.add_argument("--ways", nargs="+", help="see benchmarks/ways.py; default: by the network")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--turns", type=int, default=6, help="of every way in a launch, at most")
    parser.add_argument("--turn-seconds", type=float, default=0.8, help="which a turn takes about")
    parser.add_argument("--seconds", type=float, help="for turns; default: 120, quick 30")
    parser.add_argument("--cycle-time-ms", type=float, help="of Horovod, in all ways; default: its")
    parser.add_argument("--quick", action="store_true", help="the first three models, fewer ways")
    parser.add_argument("--loopback", action="store_true", help="with --netlab: loopback, too")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="PREFIX-RATE-Pranks.png")
    Launcher.add_arguments(parser, several=True)
    parser.add_argument("--launches", type=int, default=3, help="of each case")
    Jobs.add_arguments(parser)
    options = parser.parse_args()
    if wrong := check_names(options.ways or []):
        parser.error(f"--ways: {wrong}")
    places = Launcher.each_of(parser, options)
    if options.loopback and options.netlab:
        places.append(Launcher(None))
    if options.plot:
        load_pyplot()
    options.seconds = options.seconds or (30.0 if options.quick else 120.0)

    jobs = Jobs(options.json, jobs_of(options, places))
    jobs.run(options.minutes, timeout_s=QUICK_LIMIT_S if options.quick else TIMEOUT_S)
    report(jobs, options)
    jobs.exit_where_missing()


if __name__ == "__main__":
    main()
