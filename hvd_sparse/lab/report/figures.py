"""The figures of the report, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_sparse.errors import UnsupportedError
from hvd_sparse.lab.report.log import Plan, Recording
from hvd_sparse.lab.report.summary import Curves, Floats, bucket_curve, bucket_means, rank_ms

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f6a00", "#999999")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
PHASES = {
    "stage_s": "copy",
    "accumulate_select_s": "accumulate and select",
    "exchange_s": "exchange",
    "decode_s": "decode",
}
GREY = "#6b7280"
MOST_CURVES = len(COLOURS)
FEW_POINTS = 40
"""A curve with fewer points shows each of them by a marker."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def svg(name: str, draw: Callable[..., None], *data: Any) -> str:
    """What `draw(axes, *data)` draws, as an `<svg>` element; its `name` is unique on a page.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "a report needs matplotlib: pip install 'hvd-sparse[report]'"
        ) from error
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, *data)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def phases(axes: Any, curves: Curves) -> None:
    """Time per phase, stacked."""
    at, stack = stairs(curves, *(1e3 * curves.figures[name] for name in PHASES))
    axes.stackplot(at, *stack, labels=PHASES.values(), colors=COLOURS, alpha=0.85, lw=0)
    _finish(axes, "ms per step", legend=True)


def step_time(axes: Any, curves: Curves) -> None:
    """Time per step, and the part of it spent waiting for buckets."""
    at, (step_ms, wait_ms) = stairs(curves, 1e3 * curves.step_s, 1e3 * curves.figures["wait_s"])
    axes.plot(at, step_ms, color=COLOURS[0], label="whole step")
    axes.fill_between(at, wait_ms, color=COLOURS[1], alpha=0.85, lw=0, label="waiting for buckets")
    _finish(axes, "ms per step", legend=True)


def sent_bytes(axes: Any, curves: Curves) -> None:
    """Bytes sent, and those of a dense ring allreduce."""
    at, (sent, dense) = stairs(curves, curves.figures["bytes_sent"] / 1e6, curves.dense_bytes / 1e6)
    axes.plot(at, sent, color=COLOURS[0], label="sent")
    if np.nansum(dense):
        axes.plot(at, dense, color=GREY, linestyle="--", label="dense ring allreduce")
    is_log = bool(np.nansum(sent))
    axes.set_yscale("log" if is_log else "linear")
    _finish(axes, "MB per step and rank", legend=True, from_zero=not is_log)


def density(axes: Any, plan: Plan) -> None:
    """Density selected, applied, wanted and aimed at, by bucket."""
    numel = np.array([max(1, bucket["numel"]) for bucket in plan.buckets])
    target = np.array([bucket["k"] for bucket in plan.buckets]) / numel
    means = bucket_means(plan)
    wanted = means["nnz_wanted"] / numel
    at = np.arange(len(numel))
    marker = 5 if len(numel) <= 40 else 3
    axes.hlines(target, at - 0.4, at + 0.4, color=GREY, label="target k/n")
    if not np.allclose(wanted, target, rtol=0.02, atol=0):
        axes.hlines(wanted, at - 0.4, at + 0.4, color=GREY, ls=":", label="wanted, with warm-up")
    for name, shape, colour in (("selected", "o", COLOURS[0]), ("applied", "D", COLOURS[5])):
        reached = means[f"nnz_{name}"] / numel
        axes.plot(at, reached, shape, mfc="none", mec=colour, ms=marker, label=name)
    axes.set_yscale("log")
    axes.set_xlim(-0.6, max(len(numel) - 0.4, 0.6))
    _finish(axes, "density", "bucket", legend=True, from_zero=False)


def bucket_curves(axes: Any, plan: Plan, name: str, label: str) -> None:
    """One curve per bucket; the largest buckets are named."""
    by_numel = sorted(range(len(plan.buckets)), key=lambda b: -plan.buckets[b]["numel"])
    for place, bucket in enumerate(by_numel):
        steps, values = bucket_curve(plan, name, bucket)
        if not steps:
            continue
        is_named = place < MOST_CURVES
        axes.plot(
            steps,
            values,
            color=COLOURS[place] if is_named else "#d1d5db",
            lw=1.6 if is_named else 0.8,
            zorder=3 if is_named else 1,
            marker="." if len(steps) < FEW_POINTS else None,  # shows a point between two holes
            label=f"bucket {bucket}" if is_named else None,
        )
    if axes.lines:
        axes.set_yscale("log")
    _finish(axes, label, legend=bool(axes.lines), from_zero=False)


def ranks(axes: Any, recording: Recording) -> None:
    """By how much each rank comes later than the first: the longest bar is the slowest rank's."""
    at = np.arange(recording.run["world_size"])
    exchange_ms = rank_ms(recording).mean(axis=0)
    axes.bar(at, exchange_ms.max() - exchange_ms, 0.7, color=COLOURS[5], alpha=0.85)
    axes.set_xlim(-0.6, max(len(at) - 0.4, 0.6))
    _finish(axes, "ms later than the first", "rank", legend=False)


def stairs(curves: Curves, *columns: Floats) -> tuple[Floats, list[Floats]]:
    """Means as stairs: each spans its steps, with holes where no step was recorded.

    Returns the steps at the corners, and every column's values there.
    """
    at = np.column_stack((curves.start, curves.step)).ravel()
    holes = 2 * np.flatnonzero(curves.start[1:] > curves.step[:-1]) + 2
    values = [np.insert(np.repeat(column, 2), holes, np.nan) for column in columns]
    return np.insert(at, holes, at[holes]), values


def _finish(
    axes: Any, y_label: str, x_label: str = "step", *, legend: bool, from_zero: bool = True
) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        if high < 20 * low:  # too few powers of ten: use linear ticks
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_minor_locator(NullLocator())
        elif high < 1000 * low:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if from_zero:
        axes.set_ylim(bottom=0)
    if legend:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=8)
