"""Final metrics of sparse trainings, compared with dense ones of the same seeds and steps.

    python -m benchmarks.convergence --json build/convergence.jsonl
    python -m benchmarks.convergence --json build/convergence.jsonl --only-report \\
        --report benchmarks/results/convergence.json --plot docs/convergence.png

Every finished training is a line of `--json`: the same command continues where it was stopped. The
most informative trainings come first. The P ranks are threads of one process, which changes no
figure here, since nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks._launch import keep_memory
from benchmarks.convergence_adamw import ADAMW_DENSITIES
from benchmarks.convergence_cases import (
    HOSTS,
    LOW_RATE,
    MEMORIES,
    METHOD_NAMES,
    RATES,
    SEEDS,
    TASKS,
    WORKERS,
    Case,
    cases,
)
from benchmarks.convergence_report import markdown, plot, rows_of
from benchmarks.convergence_run import Run, train
from benchmarks.convergence_tasks import Task
from benchmarks.report import write_report


class Runs:
    """The trainings in a file, one per line; those of other recipes are ignored.

    Args:
        path: The file; may be missing.

    Attributes:
        cases: All cases in the file, of any recipe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tasks: dict[str, Task] = {}
        self._saved: dict[tuple[str, str], Run] = {}
        self.cases: list[Case] = []
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the process ended in the middle of a line
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            saved = json.loads(line)
            case = Case(**saved["case"])
            self.cases.append(case)
            self._saved[_key(case._asdict()), _key(saved["recipe"])] = Run(**saved["run"])

    def task(self, name: str) -> Task:
        """The task of that name, made on first use."""
        if name not in self._tasks:
            self._tasks[name] = TASKS[name]()
        return self._tasks[name]

    def get(self, case: Case) -> Run | None:
        """The result of a training with the present recipe, or None."""
        recipe = case.recipe(self.task(case.task).data())
        return self._saved.get((_key(case._asdict()), _key(recipe)))

    def add(self, case: Case, run: Run) -> None:
        """Append a training."""
        recipe = case.recipe(self.task(case.task).data())
        self._saved[_key(case._asdict()), _key(recipe)] = run
        line = json.dumps({"case": case._asdict(), "recipe": recipe, "run": asdict(run)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def run_all(chosen: Sequence[Case], runs: Runs) -> None:
    """Run the missing trainings."""
    left = [case for case in chosen if runs.get(case) is None]
    start = time.perf_counter()
    for number, case in enumerate(left, 1):
        task = runs.task(case.task)
        is_plain = (case.method, case.memory, case.hosts) == ("oktopk", "plain", 0)
        measure_xi = is_plain and not case.has_adamw
        run = train(
            *(task, case.make(), case.seed, case.workers, case.budget),
            measure_xi=measure_xi,
            hosts=case.hosts,
            beta1=case.beta1,
        )
        runs.add(case, run)
        dense = runs.get(case.dense)
        gap = "" if dense is None else f", {task.gap(run.final, dense.final):+.2f} {task.gap_unit}"
        print(
            f"[{number}/{len(left)}, {(time.perf_counter() - start) / 60:.1f} min] {case.words}: "
            f"{run.final:.3f} {task.unit}{gap}; density {run.applied:.4f}, "
            f"{run.updates:.1f} updates, {run.mbytes / run.dense_mbytes:.4f} of the bytes",
            flush=True,
        )


def chosen_of(candidates: Iterable[Case], arguments: argparse.Namespace) -> list[Case]:
    """The cases that the arguments select."""

    def takes(case: Case) -> bool:
        return (
            case.task in arguments.tasks
            and case.density in arguments.densities
            and case.seed in arguments.seeds
            and case.rate in arguments.rates
            and case.workers in arguments.workers
            and case.method in arguments.methods
            and (case.method == "dense" or case.memory in arguments.memories)
            and (case.method == "dense" or case.hosts in arguments.hosts)
        )

    return [case for case in candidates if takes(case)]


def tuning_cases(arguments: argparse.Namespace) -> Iterable[Case]:
    """Every memory, on seeds that are not reported."""
    for seed in sorted(set(arguments.seeds) - set(SEEDS)):
        for task in arguments.tasks:
            for density in TASKS[task].budgets.keys() & set(arguments.densities):
                for method in arguments.methods:
                    for memory in ("plain",) if method == "dense" else arguments.memories:
                        yield Case(task, method, memory, density, "float32", seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add, rates = parser.add_argument, (*RATES, LOW_RATE)
    add("--json", type=Path, default=Path("build/convergence.jsonl"), help="one line a training")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--methods", nargs="+", choices=METHOD_NAMES, default=list(METHOD_NAMES))
    add("--memories", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    add("--hosts", nargs="+", type=int, choices=HOSTS, default=list(HOSTS), help="0: flat")
    add(
        "--densities", nargs="+", type=float, choices=ADAMW_DENSITIES, default=list(ADAMW_DENSITIES)
    )
    add("--rates", nargs="+", type=float, choices=rates, default=list(rates))
    add("--workers", nargs="+", type=int, choices=WORKERS, default=list(WORKERS))
    add("--seeds", nargs="+", type=int, default=list(SEEDS))
    add("--report", type=Path, help="where to write the report, as JSON")
    add("--plot", type=Path, help="where to write the learning curves, as PNG")
    add("--table", type=Path, help="where to write the table of docs/convergence.md")
    add("--only-report", action="store_true", help="report what is there; train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    runs = Runs(arguments.json)
    chosen = chosen_of((*cases(), *tuning_cases(arguments)), arguments)
    if not arguments.only_report:
        run_all(chosen, runs)
    there = (*chosen, *chosen_of(runs.cases, arguments))
    found = {case: run for case in there if (run := runs.get(case)) is not None}
    write_report("convergence", rows_of(found), arguments.report)
    if arguments.table:
        arguments.table.write_text(markdown(found) + "\n", encoding="utf-8")
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
