"""A predicted step as a timeline: what backward hides, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_sparse.errors import ConfigError
from hvd_sparse.files import replacing
from hvd_sparse.lab.predicted import Span, schedule
from hvd_sparse.lab.simulator.simulation import Outcome
from hvd_sparse.planner.choose import Placement, TimedTensor, jobs_of
from hvd_sparse.planner.costs import Profile

# MERGED simulator.plots
# Curves over the number of ranks.

CURVES: tuple[tuple[str, bool, Callable[[Outcome], float | None]], ...] = (
    ("seconds of an exchange", True, lambda o: o.exchange_s),
    ("words received by the worst rank", True, lambda o: o.received_words.worst),
    ("parallel efficiency, weak scaling", False, lambda o: o.efficiency),
)


def load_pyplot(path: Path | str | None = None) -> Any:
    """Matplotlib's pyplot, drawing to files.

    Args:
        path: Where a plot is to go; its suffix says in which format, none: PNG.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format, or there is no such
            folder.
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


def plot_outcomes(outcomes: Sequence[Outcome], title: str, path: Path | str) -> None:
    """Draw time, volume and efficiency against the number of ranks, a curve per algorithm.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the path's format.
    """
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
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format=partial.suffix[1:] or "png")
    pyplot.close(figure)


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
    """What happens in a step by lane: kind, start and stop in seconds from the first gradient."""
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
    """Draw the dense step above the planned one, over the same seconds.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the path's format.
    """
    pyplot = load_pyplot(path)
    figure, every = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True)
    for axes, (title, which) in zip(
        every, (("all dense", {}), ("as planned", placements)), strict=True
    ):
        _draw(axes, title, timeline(profile, tensors, which))
    every[1].set_xlabel("ms from the first gradient")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="lower center", ncols=len(COLORS), fontsize="small")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format=partial.suffix[1:] or "png")
    pyplot.close(figure)


def _draw(axes: Any, title: str, lanes: dict[str, list[tuple[str, float, float]]]) -> None:
    for place, (_, spans) in enumerate(reversed(lanes.items())):
        for kind, start_s, stop_s in spans:
            axes.broken_barh(
                [(1e3 * start_s, 1e3 * (stop_s - start_s))],
                (place - 0.35, 0.7),
                color=COLORS[kind],
                edgecolor="white",
                linewidth=0.3,
            )
    end_s = max(stop_s for spans in lanes.values() for *_, stop_s in spans)
    axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
    axes.set_title(f"{title}: {1e3 * end_s:.1f} ms", loc="left", fontsize="medium")
    axes.grid(axis="x", alpha=0.3)


def _parts(span: Span) -> list[tuple[str, float, float]]:
    """A job's parts one after the other; a dense one is one part."""
    parts, at_s = [], span.start_s
    for kind, seconds in span.job.parts or (("dense", span.job.seconds),):
        parts.append((kind, at_s, at_s + seconds))
        at_s += seconds
    return parts
