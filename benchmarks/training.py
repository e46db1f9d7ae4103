"""Steps of real training, compared with what a user would pick instead.

    python -m benchmarks.training --json FILE --netlab 1gbit 100mbit --loopback --plot docs/training
    python -m benchmarks.training --json FILE --netlab 1gbit 100mbit --quick --minutes 17

Plain SGD trains models with their real tensors (benchmarks/models.py) in all ways
(benchmarks/ways.py). The ways of a launch take turns of some steps. A figure is the median of three
launches. "Overhead" is the time beyond computing alone. Bytes are those that a host's interface
sent. For our ways the rows include the share of the exchanges that backward hides.

Horovod's threads cost by the number of names that they have ever seen, so that ways which share a
process pay for each other's: `--apart` gives each a launch of its own.

Each launch is a real job under the unmodified horovodrun: on loopback, or with `--netlab RATE` one
rank per host of a network lab whose links are shaped to RATE (tools/netlab; needs root). Finished
launches are kept beside the report: the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._launch import Job, Jobs, Launcher, cycle_time
from benchmarks.models import MODELS
from benchmarks.report import Row, Spread, row_of, write_report
from benchmarks.ways import UNAVERAGED, check_names, is_ours
from hvd_sparse.cli.tuned import missing
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
Found = dict[str, Any]
"""Rank 0's results of one launch: see benchmarks/training_worker.py."""

World = tuple[str, str, int]
"""A case, its place and P."""

APART = " apart: "
"""Before a way's name, in the case of a launch that has no other."""
MORE = "+"
"""Suffix of a model's name for a second launch with further ways."""
LEAST_OVER_HOROVOD = {"1gbit": {"vgg16": 3.0, "transformer35": 4.0, "lstm": 4.0}}
LEAST_OVER_HOROVOD["100mbit"] = dict.fromkeys(("vgg16", "transformer35", "lstm"), 15.0)
LEAST_OVER_RIVALS = {"1gbit": {"vgg16": 1.6, "transformer35": 2.0, "lstm": 2.0}}
RIVALS = ("powersgd", "horovod-fp16", "ddp-fp16", "ddp-bf16")
MOST_OVERHEAD = {"1gbit": 0.15}
MOST_LOSS = 0.03
COLOURS = {"alone": "#d9d9d9", "horovod": "#737373", "asleep": "#9ecae1", "powersgd": "#fdae6b"}
OURS, OTHERS = "#2171b5", "#a6a6a6"


def ways_of(
    model: str, at: Launcher, ranks: int, options: argparse.Namespace
) -> dict[str, tuple[str, ...]]:
    """The ways compared on one model in one world, by the case's name."""
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
    """The models trained in one place, the most informative first."""
    if options.models:
        return tuple(options.models)
    if options.quick:
        return ("vgg16",) if at.rate in SLOW_RATES else FIRST_MODELS
    return MODELS_AT_1GBIT if at.rate == "1gbit" else FIRST_MODELS


def jobs_of(options: argparse.Namespace, places: list[Launcher]) -> Iterator[Job]:
    """All launches, case by case."""
    environment = () if options.cycle_time_ms is None else cycle_time(options.cycle_time_ms)
    if options.tuned:
        environment += tuple(missing().items())
    for ranks in options.ranks:
        for at in places:
            for model in models_of(at, options):
                for case, ways in ways_of(model, at, ranks, options).items():
                    arguments: tuple[str, ...] = ("--model", model)
                    arguments += ("--turns", str(options.turns))
                    arguments += ("--turn-seconds", f"{options.turn_seconds:g}")
                    arguments += ("--seconds", f"{options.seconds:g}")
                    if options.device != "cpu":
                        arguments += ("--device", options.device)
                    if options.batches > 1:
                        arguments += ("--batches", f"{options.batches}")
                    for launch in range(1, options.launches + 1):
                        if not options.apart:
                            taken = (*arguments, "--ways", *ways)
                            yield Job(case, at, ranks, launch, WORKER, taken, environment)
                            continue
                        for way in ("alone", *ways):
                            taken = (*arguments, "--apart", "--ways", *{way} - {"alone"})
                            name = f"{case}{APART}{way}"
                            yield Job(name, at, ranks, launch, WORKER, taken, environment)


def joined(found: Mapping[World, Sequence[Found]]) -> dict[World, list[Found]]:
    """Launches of single ways, of which each case has as many, become launches of all ways."""
    joint: dict[World, list[Found]] = {}
    for (name, *at), results in found.items():
        launches = joint.setdefault((name.partition(APART)[0], *at), [])  # type: ignore[arg-type]
        launches += [{"ways": {}} for _ in range(len(results) - len(launches))]
        for launch, result in zip(launches, results, strict=True):
            launch |= result | {"ways": launch["ways"] | result["ways"]}
    return joint


def step_s(found: Found, way: str) -> float:
    """Seconds of a step."""
    return float(found["ways"][way]["step_s"])


def spread(
    results: Sequence[Found], way: str, figure: str = "step_s", scale: float = 1e3
) -> Spread:
    """A way's figure over the launches; steps in milliseconds."""
    return Spread.of(results, lambda found: found["ways"][way][figure], scale)


def title_of(model: str) -> str:
    title = MODELS[model.removesuffix(MORE)].title
    return f"{title}, more ways" if model.endswith(MORE) else title


def case_of(model: str, place: str, ranks: int, results: list[Found]) -> str:
    case = f"{title_of(model)}; {place}, P={ranks}"
    if device := results[0].get("device"):
        return case + str(device)
    return f"{case}, 2 cores" if ranks > 2 else case


def step_rows(model: str, place: str, ranks: int, results: list[Found]) -> Iterator[Row]:
    """Every way: step, processor time, bytes, and the share of exchanges that backward hides."""
    case = case_of(model, place, ranks, results)
    horovod = None
    if "horovod" in results[0]["ways"]:
        horovod = spread(results, "horovod").middle
    for way, figures in results[0]["ways"].items():
        ms = spread(results, way)
        metric = f"step, {way}"
        if "sparse_tensors" in figures:
            metric += f", {figures['sparse_tensors']} tensors sparse"
        baseline = None if horovod is None else f"plain Horovod: {horovod:.0f} ms"
        ratio = None if horovod is None else horovod / ms.middle
        yield row_of(case, metric, ms, baseline=baseline, ratio=ratio)
        worked = spread(results, way, "cpu_s")
        yield row_of(case, f"processor time of a worker in a step, {way}", worked)
        for of in figures["threads_s"]:
            share = Spread.of(results, lambda f, w=way, o=of: f["ways"][w]["threads_s"][o], 1e3)  # type: ignore[misc]
            yield row_of(case, f"of it in threads: {of}, {way}", share)
        if way == "alone":
            continue
        if figures["host_bytes"]:
            sent = spread(results, way, "host_bytes", 1e-6)
            yield row_of(case, f"sent by a host in a step, {way}", sent, "MB")
        if all("hidden_share" in found["ways"][way] for found in results):
            hidden = spread(results, way, "hidden_share", 100)
            yield row_of(case, f"exchanges hidden behind backward, {way}", hidden, "%")


def goal_rows(model: str, place: str, ranks: int, results: list[Found]) -> Iterator[Row]:
    """The goals for the best of ours, and for the planner."""
    case = case_of(model, place, ranks, results)
    names = list(results[0]["ways"])
    ours = [name for name in names if is_ours(name)]
    if not ours or "horovod" not in names:
        return

    def middle(name: str) -> float:
        return spread(results, name).middle

    best = min(ours, key=middle)
    yield against(case, best, "horovod", results, LEAST_OVER_HOROVOD.get(place, {}).get(model))
    rivals = [name for name in names if name.startswith(RIVALS)]
    if rivals:
        rival = min(rivals, key=middle)
        yield against(case, best, rival, results, LEAST_OVER_RIVALS.get(place, {}).get(model))
    over = Spread.of(results, lambda found: overhead(found, best))
    limit = MOST_OVERHEAD.get(place)
    yield row_of(
        case,
        f"overhead of the best of ours, {best}",
        Spread(100 * over.middle, 100 * over.least, 100 * over.most, over.launches),
        "%",
        baseline=f"computing alone: {middle('alone'):.0f} ms",
        goal=None if limit is None else f"at most {100 * limit:g} %",
        met=None if limit is None else over.middle <= limit,
    )
    dense = [name for name in names if name not in UNAVERAGED and not is_ours(name)]
    fastest = min(dense, key=middle)
    for planned in (name for name in ours if name.startswith("planned")):
        share = Spread.of(results, lambda f, p=planned: step_s(f, p) / step_s(f, fastest))  # type: ignore[misc]
        yield row_of(
            case,
            f"{planned} over the fastest dense way, {fastest}",
            share,
            "×",
            baseline=f"{fastest}: {middle(fastest):.0f} ms",
            goal=f"at most {1 + MOST_LOSS:g} ×",
            met=share.middle <= 1 + MOST_LOSS,
        )


def against(case: str, ours: str, other: str, results: list[Found], goal: float | None) -> Row:
    """The best of ours compared with another way."""
    factor = Spread.of(results, lambda found: step_s(found, other) / step_s(found, ours))
    return row_of(
        case,
        f"step of the best of ours, {ours}",
        spread(results, ours),
        baseline=f"{other}: {spread(results, other).middle:.0f} ms",
        ratio=factor.middle,
        goal=None if goal is None else f"at least {goal:g} ×",
        met=None if goal is None else factor.middle >= goal,
    )


def overhead(found: Found, way: str) -> float:
    """Time of a step beyond computing alone, as a share of the latter."""
    return step_s(found, way) / step_s(found, "alone") - 1


def plot_steps(found: Mapping[str, Sequence[Found]], title: str, path: Path) -> None:
    """A panel for each model, a bar for each way; lines show the launches' spread."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(found), figsize=(4.6 * len(found), 5), squeeze=False)
    for axes, (model, results) in zip(panels[0], found.items(), strict=True):
        order = sorted(results[0]["ways"], key=lambda way: -spread(results, way).middle)
        chosen = [spread(results, way) for way in order]
        heights = [each.middle for each in chosen]
        errors = [
            [each.middle - each.least for each in chosen],
            [each.most - each.middle for each in chosen],
        ]
        colours = [colour_of(way) for way in order]
        bars = axes.barh(range(len(order)), heights, xerr=errors, color=colours, ecolor="#444444")
        axes.bar_label(bars, fmt=" %.0f", fontsize=7)
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.set(title=title_of(model), xlabel="ms per training step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def colour_of(way: str) -> str:
    if is_ours(way):
        return OURS
    return next((c for name, c in COLOURS.items() if way.startswith(name)), OTHERS)


def report(jobs: Jobs, options: argparse.Namespace) -> None:
    """Write the rows and plots of the finished launches."""
    found = joined(jobs.results())
    rows = [row for world, results in found.items() for row in goal_rows(*world, results)]
    rows += [row for world, results in found.items() for row in step_rows(*world, results)]
    if options.plot:
        for place, ranks in sorted({(place, ranks) for _, place, ranks in found}):
            here = {m: r for (m, p, n), r in found.items() if (p, n) == (place, ranks)}
            path = options.plot.with_name(f"{options.plot.name}-{place}-{ranks}ranks.png")
            plot_steps(here, f"{place}, {ranks} workers", path)
    write_report("training", rows, options.json)


def main() -> None:
    """Run missing launches, print the table, write the JSON, draw the plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: by the network")
    parser.add_argument("--ways", nargs="+", help="see benchmarks/ways.py; default: by the network")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--turns", type=int, default=6, help="most turns of every way in a launch")
    parser.add_argument("--turn-seconds", type=float, default=0.8, help="length of a turn, about")
    parser.add_argument("--seconds", type=float, help="for turns; default: 120, quick 30")
    parser.add_argument("--cycle-time-ms", type=float, help="HOROVOD_CYCLE_TIME of all ways")
    parser.add_argument("--device", default="cpu", help="cuda: all ranks on one device")
    parser.add_argument("--batches", type=int, default=1, help="of the model's, in a step's batch")
    parser.add_argument("--apart", action="store_true", help="each way in launches of its own")
    parser.add_argument("--tuned", action="store_true", help="all ways by `hvd-sparse tuned`")
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
    if not (options.apart and jobs.missing):  # a way would lack others to compare it with
        report(jobs, options)
    jobs.exit_where_missing()


if __name__ == "__main__":
    main()
