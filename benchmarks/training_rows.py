"""The rows and the plots of `benchmarks.training`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._jobs import Spread
from benchmarks._report import Row
from benchmarks.allreduce_cases import row_of
from benchmarks.models import MODELS
from benchmarks.ways import UNAVERAGED, is_ours
from hvd_sparse.lab.plots import load_pyplot

Found = dict[str, Any]
"""What one launch's rank 0 wrote: see benchmarks/training_worker.py."""

MORE = "+"
"""Behind a model's name: further ways of the same model."""
LEAST_OVER_HOROVOD = {"1gbit": {"vgg16": 3.0, "transformer35": 4.0, "lstm": 4.0}}
LEAST_OVER_HOROVOD["100mbit"] = dict.fromkeys(("vgg16", "transformer35", "lstm"), 15.0)
LEAST_OVER_RIVALS = {"1gbit": {"vgg16": 1.6, "transformer35": 2.0, "lstm": 2.0}}
RIVALS = ("powersgd", "horovod-fp16", "ddp-fp16", "ddp-bf16")
MOST_OVERHEAD = {"1gbit": 0.15}
MOST_LOSS = 0.03
COLOURS = {"alone": "#d9d9d9", "horovod": "#737373", "asleep": "#9ecae1", "powersgd": "#fdae6b"}
OURS, OTHERS = "#2171b5", "#a6a6a6"


def step_s(found: Found, way: str) -> float:
    """Seconds of a step."""
    return float(found["ways"][way]["step_s"])


def title_of(model: str) -> str:
    title = MODELS[model.removesuffix(MORE)].title
    return f"{title}, more ways" if model.endswith(MORE) else title


def case_of(model: str, place: str, ranks: int) -> str:
    case = f"{title_of(model)}; {place}, P={ranks}"
    return f"{case}, 2 cores" if ranks > 2 else case


def step_rows(model: str, place: str, ranks: int, results: list[Found]) -> Iterator[Row]:
    """Every way: its step, its overhead, its bytes, and what backward hides of its exchanges."""
    case = case_of(model, place, ranks)
    horovod = None
    if "horovod" in results[0]["ways"]:
        horovod = Spread.of(results, lambda found: step_s(found, "horovod"), 1e3).middle
    for way, figures in results[0]["ways"].items():
        ms = Spread.of(results, lambda found, w=way: step_s(found, w), 1e3)  # type: ignore[misc]
        metric = f"step, {way}"
        if "sparse_tensors" in figures:
            metric += f", {figures['sparse_tensors']} tensors sparse"
        baseline = None if horovod is None else f"plain Horovod: {horovod:.0f} ms"
        ratio = None if horovod is None else horovod / ms.middle
        yield row_of(case, metric, ms, baseline=baseline, ratio=ratio)
        if all("cpu_s" in found["ways"][way] for found in results):
            worked = Spread.of(results, lambda found, w=way: found["ways"][w]["cpu_s"], 1e3)  # type: ignore[misc]
            yield row_of(case, f"processor time of a worker in a step, {way}", worked)
        if way == "alone":
            continue
        over = Spread.of(results, lambda found, w=way: overhead(found, w), 100)  # type: ignore[misc]
        yield row_of(case, f"overhead, {way}", over, "%")
        if figures["host_bytes"]:
            sent = Spread.of(
                results,
                lambda found, w=way: found["ways"][w]["host_bytes"],  # type: ignore[misc]
                1e-6,
            )
            yield row_of(case, f"sent by a host in a step, {way}", sent, "MB")
        if all("hidden_share" in found["ways"][way] for found in results):
            hidden = Spread.of(
                results,
                lambda found, w=way: found["ways"][w]["hidden_share"],  # type: ignore[misc]
                100,
            )
            yield row_of(case, f"exchanges hidden behind backward, {way}", hidden, "%")


def goal_rows(model: str, place: str, ranks: int, results: list[Found]) -> Iterator[Row]:
    """What is promised of the best of ours, and of the planner."""
    case = case_of(model, place, ranks)
    names = list(results[0]["ways"])
    ours = [name for name in names if is_ours(name)]
    if not ours or "horovod" not in names:
        return

    def middle(name: str) -> float:
        return Spread.of(results, lambda found: step_s(found, name), 1e3).middle

    best = min(ours, key=middle)
    yield against(case, best, "horovod", results, LEAST_OVER_HOROVOD.get(place, {}).get(model))
    rivals = [name for name in names if name.startswith(RIVALS)]
    if rivals:
        rival = min(rivals, key=middle)
        yield against(case, best, rival, results, LEAST_OVER_RIVALS.get(place, {}).get(model))
    over = Spread.of(results, lambda found: overhead(found, best))
    limit = MOST_OVERHEAD.get(place)
    yield row_of(
        case,
        f"overhead of the best of ours, {best}",
        Spread(100 * over.middle, 100 * over.least, 100 * over.most, over.launches),
        "%",
        baseline=f"computing alone: {middle('alone'):.0f} ms",
        goal=None if limit is None else f"at most {100 * limit:g} %",
        met=None if limit is None else over.middle <= limit,
    )
    dense = [name for name in names if name not in UNAVERAGED and not is_ours(name)]
    fastest = min(dense, key=middle)
    for planned in (name for name in ours if name.startswith("planned")):
        share = Spread.of(results, lambda f, p=planned: step_s(f, p) / step_s(f, fastest))  # type: ignore[misc]
        yield row_of(
            case,
            f"{planned} over the fastest dense way, {fastest}",
            share,
            "×",
            baseline=f"{fastest}: {middle(fastest):.0f} ms",
            goal=f"at most {1 + MOST_LOSS:g} ×",
            met=share.middle <= 1 + MOST_LOSS,
        )


def against(case: str, ours: str, other: str, results: list[Found], goal: float | None) -> Row:
    """The best of ours against another way."""
    factor = Spread.of(results, lambda found: step_s(found, other) / step_s(found, ours))
    ms = Spread.of(results, lambda found: step_s(found, ours), 1e3)
    other_ms = Spread.of(results, lambda found: step_s(found, other), 1e3)
    return row_of(
        case,
        f"step of the best of ours, {ours}",
        ms,
        baseline=f"{other}: {other_ms.middle:.0f} ms",
        ratio=factor.middle,
        goal=None if goal is None else f"at least {goal:g} ×",
        met=None if goal is None else factor.middle >= goal,
    )


def overhead(found: Found, way: str) -> float:
    """What a step takes beyond computing, as a share of that."""
    return step_s(found, way) / step_s(found, "alone") - 1


def plot_steps(found: Mapping[str, Sequence[Found]], title: str, path: Path) -> None:
    """A panel for each model, a bar for each way; lines show the launches' spread."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(found), figsize=(4.6 * len(found), 5), squeeze=False)
    for axes, (model, results) in zip(panels[0], found.items(), strict=True):
        ways = list(results[0]["ways"])
        spreads = [
            Spread.of(results, lambda each, w=way: step_s(each, w), 1e3)  # type: ignore[misc]
            for way in ways
        ]
        order = sorted(range(len(ways)), key=lambda number: -spreads[number].middle)
        chosen = [spreads[number] for number in order]
        heights = [spread.middle for spread in chosen]
        errors = [
            [spread.middle - spread.least for spread in chosen],
            [spread.most - spread.middle for spread in chosen],
        ]
        colours = [colour_of(ways[number]) for number in order]
        bars = axes.barh(range(len(order)), heights, xerr=errors, color=colours, ecolor="#444444")
        axes.bar_label(bars, fmt=" %.0f", fontsize=7)
        axes.set_yticks(range(len(order)), [ways[number] for number in order], fontsize=8)
        axes.set(title=title_of(model), xlabel="ms per training step")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def colour_of(way: str) -> str:
    if is_ours(way):
        return OURS
    return next((c for name, c in COLOURS.items() if way.startswith(name)), OTHERS)
