"""The demo's table and plot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

WARMUP_STEPS = 5
NOTES = """\
Sparse is --compression "{sparse}". Everything else is the same: {numel:,} parameters,
their first values, the batches.
Step: median. Training: all steps together. Train loss: mean of the last 10 steps.
kB/step: what a worker sends for gradients. For sparse ones it is counted on the wire, headers
included; for dense ones it is the volume of a ring allreduce, 2 (P - 1) / P x 4 bytes x numbers."""
HOST_NOTE = """
MB/host: what a host's interface has sent in all, from Horovod's start to its end."""


@dataclass(frozen=True)
class Run:
    """One training; the lists, from examples/pytorch_digits.py, have one entry per step.

    Attributes:
        place: Where it ran: a network, and how many workers. What is compared shares it.
        host_bytes: What each host has sent, on average; None where that is not known.
    """

    place: str
    epochs: int
    compression: str
    world_size: int
    numel: int
    test_loss: float
    test_accuracy: float
    loss: list[float]
    step_s: list[float]
    step_bytes: list[float]
    host_bytes: float | None = None

    @property
    def label(self) -> str:
        return "dense" if self.compression == "none" else "sparse"

    @property
    def training_s(self) -> float:
        return sum(self.step_s)

    @property
    def bytes_per_step(self) -> float:
        return mean(self.step_bytes)


def table(runs: list[Run]) -> str:
    """One line per run, each compared with the dense run of its place."""
    heads = "place,gradients,step,epoch,training,speed-up,kB/step,fewer,MB/host"
    dense = {run.place: run for run in runs if run.label == "dense"}
    rows = [[*heads.split(","), "train loss", "test accuracy"]]
    for run in runs:
        other = dense[run.place]
        rows.append(
            [
                run.place,
                run.label,
                f"{median(run.step_s[WARMUP_STEPS:] or run.step_s) * 1e3:.1f} ms",
                f"{run.training_s / run.epochs:.2f} s",
                f"{run.training_s:.1f} s",
                ratio(other.training_s, run.training_s),
                f"{run.bytes_per_step / 1e3:,.1f}",
                ratio(other.bytes_per_step, run.bytes_per_step),
                "-" if run.host_bytes is None else f"{run.host_bytes / 1e6:,.1f}",
                f"{mean(run.loss[-10:]):.4f}",
                f"{run.test_accuracy:.2%}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = NOTES.format(sparse=runs[-1].compression, numel=runs[0].numel)
    if runs[0].host_bytes is not None:
        notes += HOST_NOTE
    return "\n".join([*(line.rstrip() for line in lines), "", notes])


def ratio(dense: float, this: float) -> str:
    return f"{dense / this:.1f} x" if this else "-"


def plot(runs: list[Run], path: Path) -> None:
    """For each place the loss over time; at last the bytes over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    places = list(dict.fromkeys(run.place for run in runs))
    figure, row = plt.subplots(
        1, len(places) + 1, figsize=(4.6 * (len(places) + 1), 3.8), layout="constrained"
    )
    for axes, place in zip(row, places, strict=False):
        for run in runs:
            if run.place == place:
                name = f"{run.label}: {run.training_s:.1f} s"
                axes.plot(list(accumulate(run.step_s)), smooth(run.loss), label=name)
        label(axes, f"Training loss, {place}", "seconds", "mean loss of 10 steps")
    for run in runs:
        row[-1].plot([sent / 1e3 for sent in run.step_bytes], label=f"{run.label}, {run.place}")
    row[-1].set_yscale("log")
    label(row[-1], "Sent per step and worker", "step", "kB")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()


def smooth(values: list[float], width: int = 10) -> list[float]:
    """Mean over the last `width` values."""
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
