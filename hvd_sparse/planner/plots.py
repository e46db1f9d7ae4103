"""A predicted step as a timeline: what backward hides, and what is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_sparse.files import replacing
from hvd_sparse.planner.choose import Placement, PlannedTensor, jobs_of
from hvd_sparse.planner.predict import Span, schedule
from hvd_sparse.planner.profile import Profile
from hvd_sparse.simulator.plots import load_pyplot

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
    profile: Profile, tensors: Sequence[PlannedTensor], placements: Mapping[str, Placement]
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
    tensors: Sequence[PlannedTensor],
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
