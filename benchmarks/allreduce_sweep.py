"""The sweep of `benchmarks.allreduce`: every algorithm's exchange, over ranks and densities.

As in section 8.1 of SparCML: k indices out of n at random on every rank, with random values; only
the exchange is timed. benchmarks/sweep_worker.py is what runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._launch import Launcher
from benchmarks._report import Row
from hvd_sparse.collectives.registry import CANDIDATES, LOSSLESS_CANDIDATES
from hvd_sparse.simulator.plots import load_pyplot

AUTO_GOAL = 1.2
"""How much longer than the best one what "auto" picks may take."""
CHOICES = {"auto": CANDIDATES, "auto of everything": LOSSLESS_CANDIDATES}
"""What "auto" chooses from: for a compressor, and where everything must be summed."""

World = Mapping[str, Any]
"""What a world's rank 0 found: its link, and for each density every algorithm's seconds."""


def sweep(ranks: int, numel: int, densities: list[float], repeats: int, at: Launcher) -> World:
    """Run one world."""
    print(f"comparing all algorithms on P = {ranks} …", file=sys.stderr, flush=True)
    arguments = ["--numel", str(numel), "--repeats", str(repeats), *at.interface, "--density"]
    return at.run("benchmarks/sweep_worker.py", ranks, [*arguments, *map(str, densities)])


def sweep_rows(ranks: int, world: World, numel: int, at: Launcher) -> list[Row]:
    """Every algorithm against torch's dense allreduce, and what was picked against the best."""
    case = f"P={ranks} {at.place}"
    rows = [
        Row(case, "measured α", world["link"]["alpha_s"] * 1e6, "µs"),
        Row(case, "measured g", world["link"]["gap_s"] * 1e6, "µs"),
        Row(case, "measured β", world["link"]["beta_s_per_byte"] * 1e9, "ns/byte"),
        Row(case, "measured γ", world["link"]["reduction_s_per_byte"] * 1e9, "ns/byte"),
    ]
    for found in world["densities"]:
        case = f"P={ranks} density={found['density']:g} n={numel} {at.place}"
        seconds = found["seconds"]
        for name, each_s in seconds.items():
            if name != "gloo":
                baseline = f"gloo dense allreduce: {seconds['gloo'] * 1e3:.2f} ms"
                ratio = seconds["gloo"] / each_s
                rows.append(Row(case, f"{name} exchange", each_s * 1e3, "ms", baseline, ratio))
        for choice, candidates in CHOICES.items():
            picked = found["chosen"][choice]
            best = min(candidates, key=lambda name: seconds[name])
            slower = seconds[picked] / seconds[best]
            rows.append(
                Row(
                    case,
                    f"{choice} picks {picked}",
                    seconds[picked] * 1e3,
                    "ms",
                    baseline=f"best of {len(candidates)}, {best}: {seconds[best] * 1e3:.2f} ms",
                    ratio=1 / slower,
                    goal=f"at most {AUTO_GOAL:g} × the best",
                    met=slower <= AUTO_GOAL,
                )
            )
    return rows


def plot_sweep(worlds: Mapping[int, World], numel: int, at: Launcher, path: Path) -> None:
    """Time against ranks at one density, and against density on the largest world."""
    pyplot = load_pyplot()
    figure, (by_ranks, by_density) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    largest, most = max(worlds), worlds[max(worlds)]["densities"]
    middle = len(most) // 2
    curve(
        by_ranks,
        {ranks: world["densities"][middle] for ranks, world in worlds.items()},
        f"density {most[middle]['density']:g}",
        "ranks",
    )
    by_ranks.set_xscale("log", base=2)
    by_ranks.set_xticks(list(worlds), [str(ranks) for ranks in worlds])
    by_density.set_xscale("log")
    curve(by_density, {f["density"]: f for f in most}, f"{largest} ranks", "density")
    figure.legend(*by_density.get_legend_handles_labels(), loc="lower center", ncol=8, fontsize=8)
    figure.suptitle(f"Exchange of {numel:,} elements, {at.place}; circles: what auto picks")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def curve(axes: Any, points: Mapping[float, Mapping[str, Any]], title: str, label: str) -> None:
    """One panel."""

    def ms(x: float, name: str) -> float:
        return float(points[x]["seconds"][name] * 1e3)

    for name in next(iter(points.values()))["seconds"]:
        style = "--" if name in ("dense", "gloo") else "-"
        axes.plot(list(points), [ms(x, name) for x in points], style, marker=".", label=name)
    picks = [ms(x, points[x]["chosen"]["auto"]) for x in points]
    axes.plot(list(points), picks, "o", mfc="none", mec="black", ms=10)
    axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
