"""Step time of the planner's choice, compared with plain Horovod and every choice by hand.

    python -m benchmarks.planner --goals --json benchmarks/results/planner.json --minutes 90
    python -m benchmarks.planner --json FILE --netlab 100mbit 1gbit 10gbit --models cnn
    python -m benchmarks.planner --json benchmarks/results/planner.json --plot docs/steps.png

Every model is trained in every way under the unmodified horovodrun: on loopback, or with `--netlab`
between the hosts of a network lab (tools/netlab; needs root). The ways of a model take turns in one
launch (benchmarks/training_worker.py); the median launch counts. The same command runs missing
launches. Goals: a planned step is at most 3 % slower than plain Horovod's and than `uncompressed`,
and within 10 % of the best way. `uncompressed` is Horovod with sleeping waits: this package with
nothing compressed. `--goals` runs all its cases, with VGG-16 and BERT-base by their tensors
and a backward that only waits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._launch import Job, Jobs, Launcher
from benchmarks.report import Row, write_report
from hvd_sparse.collectives.registry import LOSSLESS_CANDIDATES
from hvd_sparse.lab.plots import load_pyplot

MODELS = ("cnn", "transformer", "single")
WORLDS = {2: (None, "100mbit", "1gbit", "10gbit"), 4: ("100mbit", "1gbit", "10gbit")}
"""Networks of the goals, by the number of workers."""
SIMULATED = "-simulated"
"""Ending of the models whose backward only waits."""
LISTS = (
    *(("vgg16-simulated", 2, "1gbit"), ("vgg16-simulated", 4, "1gbit")),
    ("bert-base-simulated", 2, "1gbit"),
)
LIST_COLLECTIVES = ("topk_allgather", "ssar_recursive_double")
"""Choices by hand for those models; few, since every way has its own memory."""
SCRIPT = "benchmarks/training_worker.py"
WAYS = {
    **{"dense": "horovod", "uncompressed": "asleep", "planned": "planned@0.01"},
    **{name: f"topk:{name}@0.01" for name in LOSSLESS_CANDIDATES},
}
"""Names in benchmarks/ways.py, by those of the rows."""
TURN_S = 0.5
MOST_LOSS = 0.03
WITHIN_BEST = 0.10
WITHIN_PREDICTION = 0.25
CASES = 24
MOST_CASES = 20
"""Least cases of `CASES` with a plan near the best, and with a step near its prediction."""
LAUNCH_S = 1800.0
PLOTTED_WORLDS = {
    "P=2, 100mbit": "100 Mb/s",
    "P=2, 1gbit": "1 Gb/s",
    "P=2, 10gbit": "10 Gb/s",
    "P=2, loopback": "one host",
}
"""Endings of the cases' names: two workers, with a core each."""
PLOTTED_MODELS = {
    "cnn": "CNN with a large linear layer",
    "transformer": "small transformer",
    "single": "one layer of 7.9 M",
}
BARS = {
    "dense": ("plain Horovod", "#8c8c8c"),
    "uncompressed": ("this package, nothing compressed", "#9ecae1"),
    "planned": ("planned, density 0.01", "#2171b5"),
}
BAR_WIDTH = 0.27
DENSE = re.compile(r"plain Horovod, dense: ([\d.]+) ms")


def jobs_of(options: argparse.Namespace, places: list[Launcher]) -> list[Job]:
    """All launches: first one of every case."""
    cases = [(model, options.ranks, at) for at in places for model in options.models]
    if options.goals:
        cases = [(model, ranks, Launcher(rate)) for model, ranks, rate in LISTS]
        cases += [
            (model, ranks, Launcher(rate))
            for ranks, rates in WORLDS.items()
            for rate in rates
            for model in MODELS
        ]
    jobs = []
    for launch in range(1, options.launches + 1):
        for model, ranks, at in cases:
            by_hand = LIST_COLLECTIVES if model.endswith(SIMULATED) else options.collectives
            names = ("dense", "uncompressed", "planned", *by_hand)
            arguments = ["--model", model, "--apart", "--ways", *(WAYS[name] for name in names)]
            arguments += ["--turns", str(options.turns), "--turn-seconds", str(TURN_S)]
            arguments += ["--seconds", str(options.seconds)]
            case = model.replace(SIMULATED, ", backward simulated")
            jobs.append(Job(case, at, ranks, launch, SCRIPT, tuple(arguments)))
    return jobs


def median_launch(launches: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every way's median step and its spread; for the planned way, all of its median launch."""
    found = {}
    ways = [launch["ways"] for launch in launches]
    for name, way in WAYS.items():
        if way in ways[0]:
            ordered = sorted((each[way] for each in ways), key=lambda each: each["step_s"])
            steps_s = [each["step_s"] for each in ordered]
            spread = (1e3 * steps_s[0], 1e3 * steps_s[-1]) if len(steps_s) > 1 else None
            middle = ordered[len(ordered) // 2]
            found[name] = {**middle, "step_s": median(steps_s), "spread": spread}
    return found


def summary(rows: list[Row]) -> list[Row]:
    """The number of cases that met each goal."""
    kinds = {
        "slower than plain Horovod": ("plain Horovod, dense", None),
        "slower than Horovod with sleeping waits": ("Horovod with sleeping waits", None),
        "near the best by hand": ("the best of all", MOST_CASES),
        "near the prediction by costs alone": ("measured", MOST_CASES),
    }
    found = []
    for metric, (baseline, least) in kinds.items():
        judged = [
            row
            for row in rows
            if row.met is not None
            and (row.baseline or "").startswith(baseline)
            and row.metric != "predicted step, by its trial"
        ]
        if not judged:
            continue
        met = sum(bool(row.met) for row in judged)
        wanted = len(judged) if least is None else least * len(judged) / CASES
        name = metric if least else f"not {metric} by more than {100 * MOST_LOSS:.0f} %"
        found.append(
            Row(
                case="all",
                metric=f"cases {name}, of {len(judged)}",
                value=met,
                unit="cases",
                goal=f"at least {wanted:g}",
                met=met >= wanted,
            )
        )
    return found


def rows_of(case: str, results: dict[str, dict[str, Any]]) -> list[Row]:
    """The rows of one case: goals, predictions, and every way."""
    step_s = {way: result["step_s"] for way, result in results.items()}
    planned = results["planned"]
    others = [way for way in step_s if way != "planned"]
    best = min(others, key=lambda way: step_s[way])
    what = f"{planned['sparse_tensors']} tensors sparse"
    not_slower = f"at most {100 * MOST_LOSS:.0f} % slower"
    close = f"within {100 * WITHIN_BEST:.0f} %"
    judged = [
        (f"planned step, {what}", "plain Horovod, dense", "dense", MOST_LOSS, not_slower),
        ("planned step", "Horovod with sleeping waits", "uncompressed", MOST_LOSS, not_slower),
        ("planned step", f"the best of all, {best}", best, WITHIN_BEST, close),
    ]
    rows = [
        planned_row(case, metric, planned, (name, step_s[way]), tolerance, goal)
        for metric, name, way, tolerance, goal in judged
    ]
    rows += [
        prediction(case, "predicted step, by its trial", planned["tried_s"], step_s["planned"]),
        prediction(
            case, "predicted step, by costs alone", planned["predicted_s"], step_s["planned"]
        ),
    ]
    rows += [
        Row(
            case=case,
            metric=f"step, {way}",
            value=1e3 * seconds,
            unit="ms",
            ratio=step_s["dense"] / seconds,
            baseline="plain Horovod, dense",
            spread=results[way]["spread"],
        )
        for way, seconds in step_s.items()
        if way not in ("planned", "dense")
    ]
    return rows


def planned_row(
    case: str,
    metric: str,
    planned: Mapping[str, Any],
    other: tuple[str, float],
    tolerance: float,
    goal: str,
) -> Row:
    """A row for the planned step compared with another way's name and seconds."""
    name, seconds = other
    planned_s = planned["step_s"]
    return Row(
        case=case,
        metric=metric,
        value=1e3 * planned_s,
        spread=planned["spread"],
        unit="ms",
        baseline=f"{name}: {1e3 * seconds:.1f} ms",
        ratio=seconds / planned_s,
        goal=goal,
        met=planned_s <= (1 + tolerance) * seconds,
    )


def prediction(case: str, metric: str, predicted_s: float, measured_s: float) -> Row:
    """A step as the planner expected it."""
    return Row(
        case=case,
        metric=metric,
        value=1e3 * predicted_s,
        unit="ms",
        baseline=f"measured: {1e3 * measured_s:.1f} ms",
        ratio=measured_s / predicted_s,
        goal=f"within {100 * WITHIN_PREDICTION:.0f} %",
        met=abs(predicted_s / measured_s - 1) <= WITHIN_PREDICTION,
    )


def steps_of(report: Path, world: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, by model and by the names in `BARS`."""
    found: dict[str, dict[str, float]] = {model: {} for model in PLOTTED_MODELS}
    for row in json.loads(report.read_text(encoding="utf-8"))["rows"]:
        model, _, place = row["case"].partition(", ")
        if place != world:
            continue
        dense = DENSE.fullmatch(row.get("baseline", ""))
        if row["metric"].startswith("planned step,") and dense is not None:
            found[model] |= {"dense": float(dense[1]), "planned": row["value"]}
        elif row["metric"] == "step, uncompressed":
            found[model]["uncompressed"] = row["value"]
    return found


def draw(report: Path, path: Path) -> None:
    """One panel for each model, one group of bars for each network."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(PLOTTED_MODELS), figsize=(11, 3.2), sharey=True)
    worlds = [steps_of(report, name) for name in PLOTTED_WORLDS]
    for axes, (model, title) in zip(panels, PLOTTED_MODELS.items(), strict=True):
        for shift, (kind, (label, colour)) in enumerate(BARS.items()):
            places = [place + BAR_WIDTH * (shift - 1) for place in range(len(worlds))]
            heights = [world[model][kind] for world in worlds]
            bars = axes.bar(places, heights, BAR_WIDTH, label=label, color=colour)
            axes.bar_label(bars, fmt="%.0f", fontsize=6, padding=1)
        axes.set(title=title, yscale="log", ylim=(20, 9000))
        axes.set_xticks(range(len(worlds)), list(PLOTTED_WORLDS.values()), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms per training step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(BARS), frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure every case asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--goals", action="store_true", help="all cases of the goals")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument(
        "--collectives", nargs="*", choices=LOSSLESS_CANDIDATES, default=LOSSLESS_CANDIDATES
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6, help="most turns of a way in a launch")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for all turns")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="draw the existing report; measure nothing")
    Launcher.add_arguments(parser, several=True)
    Jobs.add_arguments(parser)
    options = parser.parse_args()
    if options.plot:
        draw(options.json, options.plot)
        return
    places = [] if options.goals else Launcher.each_of(parser, options)

    jobs = Jobs(options.json, jobs_of(options, places))
    jobs.run(options.minutes, timeout_s=LAUNCH_S)
    rows = []
    for (model, place, ranks), launches in jobs.results().items():
        found = rows_of(f"{model}, P={ranks}, {place}", median_launch(launches))
        rows += [replace(row, launches=len(launches)) for row in found]
    write_report("planner", [*summary(rows), *rows], options.json)
    jobs.exit_where_missing()


if __name__ == "__main__":
    main()
