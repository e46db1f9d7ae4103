"""The sweep of `benchmarks.allreduce`: every algorithm's exchange, over ranks and densities.

As in section 8.1 of SparCML, every rank has k random indices out of n with random values, or those
of another pattern (`--pattern`), and only the exchange is timed. The ranks run
benchmarks/sweep_worker.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row, Spread, row_of
from hvd_sparse.collectives.registry import LOSSLESS_CANDIDATES
from hvd_sparse.lab.plots import load_pyplot

AUTO_GOAL = 1.15
"""Most time of the pick of "auto" over that of the best lossless algorithm."""
AUTO_CASES_GOAL = 22 / 24
"""Share of the cases that must meet `AUTO_GOAL`."""
NUMEL = 1 << 22
DENSITIES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1)

World = Mapping[str, Any]
"""Rank 0's results: the link, and every algorithm's seconds at each density."""


def sweep_arguments(repeats: int, pattern: str) -> tuple[str, ...]:
    """The arguments of benchmarks/sweep_worker.py."""
    options = ("--numel", str(NUMEL), "--repeats", str(repeats), "--pattern", pattern, "--density")
    return (*options, *map(str, DENSITIES))


def times_the_best(found: Mapping[str, Any]) -> float:
    """Time of the pick of "auto" over that of the fastest candidate."""
    seconds = found["seconds"]
    return float(seconds[found["chosen"]] / min(seconds[name] for name in LOSSLESS_CANDIDATES))


def sweep_rows(ranks: int, place: str, worlds: Sequence[World]) -> list[Row]:
    """Every algorithm compared with torch's dense allreduce, and the pick with the best."""
    case = f"P={ranks} {place}"
    rows = [
        link_row(case, worlds, "α", "alpha_s", 1e6, "µs"),
        link_row(case, worlds, "g", "gap_s", 1e6, "µs"),
        link_row(case, worlds, "β", "beta_s_per_byte", 1e9, "ns/byte"),
        link_row(case, worlds, "γ", "reduction_s_per_byte", 1e9, "ns/byte"),
    ]
    for number, density in enumerate(DENSITIES):
        launches = [world["densities"][number] for world in worlds]
        case = f"P={ranks} density={density:g} n={NUMEL} {place}"
        for name in launches[0]["seconds"]:
            ms = Spread.of(launches, lambda each, n=name: each["seconds"][n], 1e3)  # type: ignore[misc]
            gloo = Spread.of(launches, lambda each: each["seconds"]["gloo"], 1e3).middle
            dense = f"gloo dense allreduce: {gloo:.2f} ms"
            ratio = gloo / ms.middle
            rows.append(row_of(case, f"{name} exchange", ms, baseline=dense, ratio=ratio))
        share = Spread.of(launches, times_the_best)
        picks = " or ".join(sorted({each["chosen"] for each in launches}))
        rows.append(
            row_of(
                case,
                f"auto picks {picks}: over the best of {len(LOSSLESS_CANDIDATES)}",
                share,
                "×",
                goal=f"at most {AUTO_GOAL:g} ×",
                met=share.middle <= AUTO_GOAL,
            )
        )
    return rows


def auto_row(rows: Sequence[Row], place: str) -> Row:
    """In how many cases of one network "auto" was near the best."""
    near = [row.met for row in rows if row.metric.startswith("auto picks")]
    return Row(
        f"all worlds, {place}",
        f"cases of {len(near)} in which auto is near the best lossless algorithm",
        sum(map(bool, near)),
        "cases",
        goal="at least 22 of 24",
        met=sum(map(bool, near)) >= AUTO_CASES_GOAL * len(near),
    )


def link_row(
    case: str, worlds: Sequence[World], name: str, key: str, scale: float, unit: str
) -> Row:
    """A measured coefficient of the link."""
    figure = Spread.of(worlds, lambda world: world["link"][key], scale)
    return row_of(case, f"measured {name}", figure, unit)


def plot_sweep(worlds: Mapping[int, World], place: str, path: Path) -> None:
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
    figure.suptitle(f"Exchange of {NUMEL:,} elements, {place}; circles: what auto picks")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def curve(axes: Any, points: Mapping[float, Mapping[str, Any]], title: str, label: str) -> None:
    """Draw one panel."""

    def ms(x: float, name: str) -> float:
        return float(points[x]["seconds"][name] * 1e3)

    for name in next(iter(points.values()))["seconds"]:
        style = "--" if name in ("dense", "gloo") else "-"
        axes.plot(list(points), [ms(x, name) for x in points], style, marker=".", label=name)
    picks = [ms(x, points[x]["chosen"]) for x in points]
    axes.plot(list(points), picks, "o", mfc="none", mec="black", ms=10)
    axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel(label)
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
