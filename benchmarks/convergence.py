"""Final metrics of trainings with every compressor, against dense ones of the same seeds and steps.

    python -m benchmarks.convergence --json benchmarks/results/convergence.json

P ranks are threads of one process, which changes no figure here: nothing is timed. Every finished
training is kept in `--runs`, so that a run that was stopped goes on where it was; `--only` takes
those whose "task compressor density seed" a regular expression finds.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import torch

from benchmarks._report import Row, write_report
from benchmarks.convergence_run import Run, train
from benchmarks.convergence_tasks import TASKS, Task
from hvd_sparse.engine import Method
from hvd_sparse.methods import METHODS

WORLD_SIZE = 4
DENSITIES = (0.01, 0.001)
SEEDS = (0, 1, 2)
PROMISED = ("dgc", "dragonn", "exdyna", "oktopk")
"""Compressors that must come near to dense at density 0.01."""
DENSE_FIRST = ("exdyna", "oktopk", "clt_k")
"""Compressors that apply only k entries a step: their first steps are dense, as in some trainings
of Ok-Topk's authors. Without that ExDyna and CLT-k lose more than a point on the digits.

How many was chosen on other seeds (3, 4 and 5): of 50, 75 and 100 for the digits, where ExDyna and
Ok-Topk together lost least with 75; of 400, 500 and 600 for the text, where it made no difference.
"""
ORDER = (
    *PROMISED,
    "topk",
    "sidco",
    "clt_k",
    "mstopk",
    "gaussiank",
    "randomk",
    "hard_threshold",
)
LIMITS = {"digits CNN": (0.5, "points"), "text LSTM": (1.0, "%")}


class Case(NamedTuple):
    """One training."""

    task: type[Task]
    compressor: str
    density: float
    seed: int

    @property
    def words(self) -> str:
        return f"{self.task.name} {self.compressor} {self.density:g} {self.seed}"

    def method(self) -> Method | None:
        """Everything has DGC's memory and warm-up, as in DRAGONN's comparison.

        Random-k has plain error feedback; with either memory it does not learn at these rates.
        """
        if self.compressor == "dense":
            return None
        recipe = self.task.recipe
        arguments: dict[str, Any] = {
            "density": self.density,
            "momentum": 0.0 if self.compressor == "randomk" else recipe.momentum,
            "warmup_steps": recipe.warmup_steps,
            "dense_steps": recipe.dense_steps if self.compressor in DENSE_FIRST else 0,
        }
        if self.compressor == "hard_threshold":
            arguments["threshold"] = self.task.hard_thresholds[self.density]
        method = METHODS[self.compressor](**arguments).make()
        assert isinstance(method, Method)
        return method


def cases() -> Iterator[Case]:
    """All trainings, the most telling first."""
    for density in DENSITIES:
        for names in (("dense", *PROMISED), ORDER[len(PROMISED) :]):
            for seed in SEEDS:
                for name in names:
                    for task in TASKS:
                        if name != "dense":
                            yield Case(task, name, density, seed)
                        elif density == DENSITIES[0]:
                            yield Case(task, name, 1.0, seed)


def path_of(case: Case, folder: Path) -> Path:
    return folder / (re.sub(r"[^a-z0-9.]+", "-", case.words.lower()) + ".json")


def load(case: Case, folder: Path) -> Run | None:
    """What came of a training with today's recipe, or None."""
    path = path_of(case, folder)
    if not path.exists():
        return None
    saved = json.loads(path.read_text(encoding="utf-8"))
    return Run(**saved["run"]) if saved["recipe"] == recipe_of(case) else None


def recipe_of(case: Case) -> dict[str, Any]:
    method = case.method()
    recipe = asdict(case.task.recipe)
    del recipe["dense_steps"]  # is in the method
    return {
        **recipe,
        "method": None if method is None else method.description,
        "world_size": WORLD_SIZE,
    }


def run_all(chosen: Sequence[Case], folder: Path) -> None:
    """Train what is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {task: task() for task in TASKS}
    left = [case for case in chosen if load(case, folder) is None]
    start = time.perf_counter()
    for number, case in enumerate(left, 1):
        run = train(
            tasks[case.task],
            case.method(),
            case.seed,
            WORLD_SIZE,
            measure_xi=case.compressor == "oktopk",
        )
        saved = {"recipe": recipe_of(case), "run": asdict(run)}
        path_of(case, folder).write_text(json.dumps(saved) + "\n", encoding="utf-8")
        spent = time.perf_counter() - start
        print(
            f"[{number}/{len(left)}, {spent / 60:.1f} min, "
            f"{spent / number * (len(left) - number) / 60:.0f} min left] {case.words}: "
            f"{case.task.metric} {run.final:.3f} {case.task.unit}",
            flush=True,
        )


def rows_of(folder: Path) -> list[Row]:
    """Every compressor against dense: means over the seeds that are there."""
    rows = []
    for task in TASKS:
        dense = finals(task, "dense", 1.0, folder)
        if not dense:
            continue
        rows.append(Row(task.name, f"dense: {task.metric}", mean(dense), task.unit))
        for density in DENSITIES:
            for name in ORDER:
                rows += rows_of_one(task, name, density, folder)
    return rows


def rows_of_one(task: type[Task], name: str, density: float, folder: Path) -> list[Row]:
    """The rows of one compressor at one density."""
    runs = runs_of(task, name, density, folder)
    dense = finals(task, "dense", 1.0, folder)
    if not runs:
        return []
    value = mean(run.final for run in runs)
    limit, unit = LIMITS[task.name]
    gap = task.gap(value, mean(dense))
    promised = name in PROMISED and density == DENSITIES[0]
    case = f"{task.name}, density {density:g}, {name}"
    spread = stdev(run.final for run in runs) if len(runs) > 1 else 0.0
    rows = [
        Row(
            case,
            f"{task.metric}, mean of {len(runs)} seeds (± {spread:.2g})",
            value,
            task.unit,
            f"dense {mean(dense):.4g}",
        ),
        Row(
            case,
            "worse than dense by",
            gap,
            unit,
            goal=f"<= {limit:g} {unit}" if promised else None,
            met=gap <= limit if promised else None,
        ),
        Row(case, "density applied, late", mean(run.late_density for run in runs), ""),
    ]
    xi = [x for run in runs for x in run.xi]
    if xi:
        half = [x for run in runs for x in run.xi[len(run.xi) // 2 :]]
        rows.append(Row(case, "ξ (assumption 1), median", median(xi), ""))
        rows.append(
            Row(case, "ξ, largest over the second half", max(half), "", f"P = {WORLD_SIZE}")
        )
    return rows


def runs_of(task: type[Task], name: str, density: float, folder: Path) -> list[Run]:
    found = [load(Case(task, name, density, seed), folder) for seed in SEEDS]
    return [run for run in found if run is not None]


def finals(task: type[Task], name: str, density: float, folder: Path) -> list[float]:
    return [run.final for run in runs_of(task, name, density, folder)]


def plot(folder: Path, path: Path) -> None:
    """Training loss of all compressors, and Ok-Topk's ξ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4 * len(TASKS)), layout="constrained")
    axes = figure.subplots(len(TASKS), 3, squeeze=False)
    for row, task in zip(axes, TASKS, strict=True):
        for ax, density in zip(row, DENSITIES, strict=False):
            for name in ("dense", *ORDER):
                runs = runs_of(task, name, 1.0 if name == "dense" else density, folder)
                if runs:
                    curves = torch.tensor([run.loss for run in runs]).mean(0)
                    steps = 10 * torch.arange(len(curves)) + 5
                    style = {"color": "black", "lw": 2} if name == "dense" else {"lw": 1}
                    ax.plot(steps, curves, label=name, **style)
            ax.set(title=f"{task.name}, density {density:g}", xlabel="step", ylabel="training loss")
            ax.set_yscale("log")
            ax.legend(fontsize=7)
        for density in DENSITIES:
            runs = runs_of(task, "oktopk", density, folder)
            if runs and runs[0].xi:
                xi = torch.tensor([run.xi for run in runs]).mean(0)
                steps = torch.arange(len(xi)) * (task.recipe.steps / len(xi))
                row[2].plot(steps, xi, label=f"density {density:g}")
        row[2].axhline(WORLD_SIZE, color="grey", ls=":", lw=1, label="P")
        row[2].set(title=f"{task.name}: Ok-Topk's ξ", xlabel="step", ylabel="ξ")
        row[2].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--plot", type=Path, help="where to write the plot, as PNG")
    parser.add_argument("--runs", type=Path, default=Path("build/convergence"))
    parser.add_argument("--only", default="", help="regular expression on the trainings' words")
    parser.add_argument("--report", action="store_true", help="report what is there; train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in cases() if re.search(arguments.only, case.words)]
    if not arguments.report:
        run_all(chosen, arguments.runs)
    write_report("convergence", rows_of(arguments.runs), arguments.json)
    if arguments.plot:
        plot(arguments.runs, arguments.plot)


if __name__ == "__main__":
    main()
