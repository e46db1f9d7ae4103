"""The rows and the plot of benchmarks.convergence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median, stdev

import torch

from benchmarks.convergence_cases import (
    DENSE_FIRST,
    MAX_MEAN_DENSITY,
    POWERSGD,
    PROMISED,
    TASKS,
    WORLD_SIZE,
    Case,
)
from benchmarks.convergence_run import Run
from benchmarks.report import Row

Found = Mapping[Case, Run]


def rows_of(found: Found) -> list[Row]:
    """Every compressor compared with dense: means over seeds that have both."""
    groups: dict[Case, list[Case]] = {}
    for case in found:
        groups.setdefault(case._replace(seed=0), []).append(case)
    rows = []
    for group, members in groups.items():
        rows += dense_rows(group, members, found) if group.method == "dense" else []
        pairs = [(found[case], found[case.dense]) for case in members if case.dense in found]
        if pairs and group.method != "dense":
            rows += sparse_rows(group, pairs)
    return rows


def dense_rows(group: Case, members: list[Case], found: Found) -> list[Row]:
    """The row that the others are compared with."""
    task = TASKS[group.task]
    runs = [found[case] for case in members]
    case = f"{task.name}, dense, {group.budget.steps} steps"
    metric = f"{task.metric}, {seeds_of([run.final for run in runs])}"
    return [Row(case, metric, mean(run.final for run in runs), task.unit)]


def sparse_rows(group: Case, pairs: list[tuple[Run, Run]]) -> list[Row]:
    """The rows of one compressor, memory, density and wire."""
    task = TASKS[group.task]
    runs = [run for run, _ in pairs]
    gaps = [task.gap(run.final, dense.final) for run, dense in pairs]
    limit = task.limits[group.density]
    goal = limit if group.method in PROMISED else None
    case = f"{task.name}, density {group.density:g}, {group.method}, {group.memory}, {group.wire}"
    case += group.levels
    schedule = f"{schedule_of(group)}; {group.budget.steps} steps"
    density = mean(run.applied for run in runs)
    is_low = group.density == min(task.limits)
    rows = [
        Row(
            case,
            f"{task.metric}, {seeds_of([run.final for run in runs])}",
            mean(run.final for run in runs),
            task.unit,
            f"dense {mean(dense.final for _, dense in pairs):.4g}",
        ),
        Row(
            case,
            "worse than dense by",
            mean(gaps),
            task.gap_unit,
            goal=None if goal is None else f"<= {limit:g} {task.gap_unit}",
            met=None if goal is None else mean(gaps) <= limit,
        ),
        Row(
            case,
            "mean density over the run",
            density,
            "",
            schedule,
            goal=f"<= {MAX_MEAN_DENSITY}" if is_low else None,
            met=density <= MAX_MEAN_DENSITY if is_low else None,
        ),
        Row(case, "density of the last quarter", mean(run.late_applied for run in runs), ""),
        Row(case, "mean share that a rank selects", mean(run.density for run in runs), ""),
        Row(
            case,
            "share that a rank selects in the last quarter",
            mean(run.late_density for run in runs),
            "",
        ),
        Row(case, "updates per parameter after the warm-up", mean(r.updates for r in runs), ""),
        Row(
            case,
            "megabytes sent by a rank",
            mean(run.mbytes for run in runs),
            "MB",
            f"dense ring {runs[0].dense_mbytes:.4g}",
            runs[0].dense_mbytes / mean(run.mbytes for run in runs),
        ),
    ]
    xi = [x for run in runs for x in run.xi]
    if xi:
        half = [x for run in runs for x in run.xi[len(run.xi) // 2 :]]
        rows.append(Row(case, "ξ (assumption 1), median", median(xi), ""))
        rows.append(
            Row(case, "ξ, largest over the second half", max(half), "", f"P = {WORLD_SIZE}")
        )
    return rows


def schedule_of(case: Case) -> str:
    """The beginning of a training, in words."""
    budget = case.budget
    warmup = f"{budget.warmup_steps} steps from density 0.25"
    return f"{budget.dense_steps} dense, {warmup}" if case.method in DENSE_FIRST else warmup


def seeds_of(values: list[float]) -> str:
    """The number of seeds of a mean, and their standard deviation."""
    if len(values) == 1:
        return "one seed"
    return f"mean of {len(values)} seeds (± {stdev(values):.2g})"


def markdown(found: Found) -> str:
    """The trainings as a table: a row for each task, density, method, memory and wire."""
    lines = [
        "| task | density | method | memory | wire | seeds | metric | worse by | mean density "
        "| last quarter | updates | bytes, share of dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[Case, list[Case]] = {}
    for case in found:
        if case.method != "dense" and case.dense in found:
            groups.setdefault(case._replace(seed=0), []).append(case)
    for group, members in groups.items():
        task, runs = TASKS[group.task], [found[case] for case in members]
        gaps = [task.gap(found[case].final, found[case.dense].final) for case in members]
        cells = [
            *(group.task, "" if group.method == POWERSGD else f"{group.density:g}"),
            f"{group.method}{group.levels}",
            *(group.memory, group.wire),
            str(len(runs)),
            f"{mean(run.final for run in runs):.4g} {task.unit}",
            f"{mean(gaps):+.2f} {task.gap_unit}",
            f"{mean(run.applied for run in runs):.4f}",
            f"{mean(run.late_applied for run in runs):.4f}",
            f"{mean(run.updates for run in runs):.1f}",
            f"{mean(run.mbytes / run.dense_mbytes for run in runs):.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: Found, path: Path) -> None:
    """Learning curves: the test metric along a run, a panel for each task and density."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((case.task, case.density) for case in found))
    figure = Figure(figsize=(7 * 2, 4.5 * ((len(panels) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False).flatten()
    for ax, (task, density) in zip(axes, panels, strict=False):
        curves: dict[str, list[list[float]]] = {}
        for case, run in found.items():
            if (case.task, case.density) == (task, density) and case.wire == "float32":
                label = "dense" if case.method == "dense" else f"{case.method}, {case.memory}"
                label += case.levels
                curves.setdefault(label, []).append(run.curve)
        for label, members in curves.items():
            curve = torch.tensor(members).mean(0)
            steps = torch.arange(1, len(curve) + 1) * (
                TASKS[task].budgets[density].steps / len(curve)
            )
            style = {"color": "black", "lw": 2} if label == "dense" else {"lw": 1}
            ax.plot(steps, curve, label=label, **style)
        ax.set(
            title=f"{task}, density {density:g}",
            xlabel="step",
            ylabel=f"{TASKS[task].metric}, {TASKS[task].unit}",
        )
        ax.legend(fontsize=7)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.savefig(path, dpi=90)
