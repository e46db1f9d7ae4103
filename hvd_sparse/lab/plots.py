"""Plots: simulated exchanges over the number of ranks, and a predicted step as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_sparse.errors import ConfigError
from hvd_sparse.files import replacing
from hvd_sparse.lab.simulator.simulation import SimulatedOutcome
from hvd_sparse.planner.choose import Placement, Span, TimedTensor, jobs_of, schedule
from hvd_sparse.planner.costs import Profile


def load_pyplot(path: Path | str | None = None) -> Any:
    """Load matplotlib's pyplot for drawing to a file, whose suffix gives the format; none: PNG.

    Raises:
        ConfigError: matplotlib is not installed or does not know the format, or the folder does
            not exist.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'hvd-sparse[examples]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path is not None and (Path(path).suffix[1:].lower() or "png") not in formats:
        raise ConfigError(f"{path}: a plot ends in one of .{', .'.join(sorted(formats))}")
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {Path(path).parent}")
    return pyplot


def _save(figure: Any, path: Path | str) -> None:
    """Write a figure, with room for a legend below its axes, and close it."""
    from matplotlib import pyplot

    figure.tight_layout(rect=(0, 0.06, 1, 1))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format=partial.suffix[1:] or "png")
    pyplot.close(figure)


# -- simulated exchanges ---------------------------------------------------------------------------

CURVES: tuple[tuple[str, bool, Callable[[SimulatedOutcome], float | None]], ...] = (
    ("seconds of an exchange", True, lambda o: o.exchange_s),
    ("words received by the worst rank", True, lambda o: o.received_words.worst),
    ("parallel efficiency, weak scaling", False, lambda o: o.efficiency),
)


def plot_outcomes(outcomes: Sequence[SimulatedOutcome], title: str, path: Path | str) -> None:
    """Draw time, volume and efficiency over the number of ranks, with one curve per algorithm."""
    pyplot = load_pyplot(path)
    figure, every = pyplot.subplots(1, len(CURVES), figsize=(5 * len(CURVES), 4))
    ranks = sorted({o.world_size for o in outcomes})
    for axes, (label, is_log, figure_of) in zip(every, CURVES, strict=True):
        for algorithm in dict.fromkeys(o.label for o in outcomes):
            points = [(o.world_size, figure_of(o)) for o in outcomes if o.label == algorithm]
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=algorithm)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(r) for r in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if is_log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.05)
    curves, names = every[0].get_legend_handles_labels()
    figure.legend(curves, names, loc="lower center", ncols=len(names), fontsize="small")
    figure.suptitle(title)
    _save(figure, path)


# -- a predicted step ------------------------------------------------------------------------------

LANES = ("backward", "dense", "sparse", "waiting")
COLORS = {
    "backward": "#9ca3af",
    "dense": "#2563eb",
    "encode": "#fbbf24",
    "exchange": "#ea580c",
    "decode": "#a16207",
    "waiting": "#dc2626",
}


def timeline(
    profile: Profile, tensors: Sequence[TimedTensor], placements: Mapping[str, Placement]
) -> dict[str, list[tuple[str, float, float]]]:
    """The spans of a step by lane: kind, start and stop in seconds from the first gradient."""
    spans = list(schedule(jobs_of(profile, tensors, placements)))
    backward_s = max((tensor.ready_s for tensor in tensors), default=0.0)
    lanes: dict[str, list[tuple[str, float, float]]] = {name: [] for name in LANES}
    lanes["backward"].append(("backward", 0.0, backward_s))
    for span in spans:
        lanes["sparse" if span.job.parts else "dense"] += _parts(span)
    stop_s = max((span.stop_s for span in spans), default=0.0)
    fixed_s = profile.dense.fixed_s
    lanes["dense"].append(("dense", stop_s, stop_s + fixed_s))
    lanes["waiting"].append(("waiting", backward_s, max(backward_s, stop_s + fixed_s)))
    return lanes


def plot_timelines(
    profile: Profile,
    tensors: Sequence[TimedTensor],
    placements: Mapping[str, Placement],
    path: Path | str,
) -> None:
    """Draw the dense step above the planned one, on the same axis of time."""
    pyplot = load_pyplot(path)
    figure, every = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True)
    for axes, (title, which) in zip(
        every, (("all dense", {}), ("as planned", placements)), strict=True
    ):
        _draw(axes, title, timeline(profile, tensors, which))
    every[1].set_xlabel("ms from the first gradient")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="lower center", ncols=len(COLORS), fontsize="small")
    _save(figure, path)


def _draw(axes: Any, title: str, lanes: dict[str, list[tuple[str, float, float]]]) -> None:
    for place, (_, spans) in enumerate(reversed(lanes.items())):
        for kind, start_s, stop_s in spans:
            bars, row = [(1e3 * start_s, 1e3 * (stop_s - start_s))], (place - 0.35, 0.7)
            axes.broken_barh(bars, row, color=COLORS[kind], edgecolor="white", linewidth=0.3)
    end_s = max(stop_s for spans in lanes.values() for *_, stop_s in spans)
    axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axes.set_title(f"{title}: {1e3 * end_s:.1f} ms", loc="left", fontsize="medium")
    axes.grid(axis="x", alpha=0.3)


def _parts(span: Span) -> list[tuple[str, float, float]]:
    """The spans of a job's parts, one after the other; a dense job is one part."""
    parts, at_s = [], span.start_s
    for kind, seconds in span.job.parts or (("dense", span.job.seconds),):
        parts.append((kind, at_s, at_s + seconds))
        at_s += seconds
    return parts
