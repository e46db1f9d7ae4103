"""The demo's table and plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

WARMUP_STEPS = 5
NOTES = """\
{numel:,} parameters. Train loss: mean of the last 10 steps. Step: median.
Bytes are those sent per step and rank. For what Horovod reduces densely they are the standard
volume of a ring allreduce, 2 (P - 1) / P x 4 bytes x numbers; for sparse gradients they are counted
on the wire, headers included. Within one machine there is no network to save: the step times show
what sparsification costs, not what it gains."""


@dataclass
class Run:
    """What examples/pytorch_digits.py writes with --metrics; lists have one entry per step."""

    compression: str
    world_size: int
    numel: int
    test_loss: float
    test_accuracy: float
    loss: list[float]
    step_s: list[float]
    step_bytes: list[float]

    @property
    def label(self) -> str:
        return "dense" if self.compression == "none" else self.compression

    @property
    def bytes_per_step(self) -> float:
        return mean(self.step_bytes)


def table(runs: list[Run]) -> str:
    """One line per run, each compared with the dense run on as many workers."""
    heads = "workers,gradients,train loss,test loss,test accuracy,step,kB/step/rank,reduction"
    dense = {run.world_size: run for run in runs if run.compression == "none"}
    rows = [heads.split(",")]
    for run in runs:
        rows.append(
            [
                str(run.world_size),
                run.label,
                f"{mean(run.loss[-10:]):.4f}",
                f"{run.test_loss:.4f}",
                f"{run.test_accuracy:.2%}",
                f"{median(run.step_s[WARMUP_STEPS:] or run.step_s) * 1e3:.1f} ms",
                f"{run.bytes_per_step / 1e3:,.1f}",
                reduction(dense[run.world_size], run),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*(line.rstrip() for line in lines), "", NOTES.format(numel=runs[0].numel)])


def reduction(dense: Run, run: Run) -> str:
    return f"{dense.bytes_per_step / run.bytes_per_step:.1f} x" if run.bytes_per_step else "-"


def plot(runs: list[Run], path: Path) -> None:
    """Loss and bytes over the steps, a row for each number of workers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({run.world_size for run in runs})
    figure, grid = plt.subplots(
        len(sizes), 2, figsize=(11, 3.4 * len(sizes)), squeeze=False, layout="constrained"
    )
    for row, world_size in zip(grid, sizes, strict=True):
        for run in (run for run in runs if run.world_size == world_size):
            row[0].plot(smooth(run.loss), label=run.label)
            row[1].plot([sent / 1e3 for sent in run.step_bytes], label=run.label)
        label(row[0], f"Training loss, {world_size} workers", "loss")
        row[1].set_yscale("log")
        label(row[1], f"Sent per step and rank, {world_size} workers", "kB")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.legend()


def smooth(values: list[float], width: int = 10) -> list[float]:
    """Mean over the last `width` values."""
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
