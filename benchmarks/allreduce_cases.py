"""What `benchmarks.allreduce` measures through the optimizer, and the rows that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from benchmarks._jobs import Spread
from benchmarks._report import Row
from benchmarks.models import shapes_of

Found = dict[str, Any]
"""What one launch's rank 0 wrote: see benchmarks/optimizer_worker.py."""

MATRIX = (4200, 3500)
"""One gradient of 14.7 M; PowerSGD compresses matrices only."""
OPPONENTS = ("horovod", "horovod-fp16", "gloo", "ddp-bf16", "powersgd-2")
SLOWEST = "horovod-fp16"
"""Its steps take 8 s where 4 spinning workers share 2 cores and a link: left out there."""
PLAIN_DENSE = ("horovod", "gloo")
DENSITIES = ("0.001", "0.01")
WIRES = ("float32", "float32+gap", "float16+gap")
CASES = ("buckets", "vgg16", "bert-base", "wires", "tensors-200", "tensors-800", "tiny")
LEAST_FACTORS = {  # over the faster of plain Horovod and torch's gloo, for Ok-Topk by default
    ("loopback", 2, "0.001"): 2.6,
    ("loopback", 2, "0.01"): 2.2,
    ("loopback", 4, "0.001"): 3.0,
    ("loopback", 4, "0.01"): 2.4,
    ("1gbit", 2, "0.001"): 27.0,
    ("1gbit", 2, "0.01"): 17.0,
    ("1gbit", 4, "0.001"): 20.0,
    ("1gbit", 4, "0.01"): 12.0,
}
MOST_FOR_FOUR_BUCKETS = 1.1
MOST_FOR_SMALL_TENSORS = 1.5
LEAST_FOR_HALF_WIRE = {"1gbit": 1.0, "100mbit": 1.8}


def case_of(name: str, *, has_slowest: bool = True) -> str:
    """The worker's `--case`."""
    opponents = [way for way in OPPONENTS if has_slowest or way != SLOWEST]
    ours = [f"{method}@{density}" for density in DENSITIES for method in ("oktopk", "topk")]
    shapes: Sequence[Sequence[int]] = [MATRIX]
    ways = ["alone", *opponents, *ours]
    if name == "buckets":
        ways += [f"oktopk@{density}#{buckets}" for density in DENSITIES for buckets in (1, 2, 4)]
    elif name == "wires":
        ways = [f"oktopk@{density}/{wire}" for density in DENSITIES for wire in WIRES]
        ways = ["alone", "horovod", *ways]
    elif name.startswith("tensors-"):
        draw, count = Random(0), int(name.partition("-")[2])
        shapes = [[draw.randint(1000, 10_000)] for _ in range(count)]
        ways = ["alone", "horovod", "topk@0.01", "oktopk@0.01"]
    else:
        shapes = shapes_of(name)
    if name == "bert-base":  # what fits into memory
        ways = ["alone", *opponents, *(f"oktopk@{density}" for density in DENSITIES)]
    return json.dumps({"shapes": shapes, "ways": ways})


def rows_of(name: str, place: str, ranks: int, results: list[Found]) -> Iterator[Row]:
    """The rows of one world: every way, and what is promised of it."""
    case = f"{name}, P={ranks}, {place}"
    if ranks > 2:
        case += ", 2 cores"
    for way in results[0]["seconds"]:
        yield way_row(case, way, place, ranks, results)
    if name == "buckets":
        for density in DENSITIES:
            yield from bucket_rows(case, f"oktopk@{density}", results)
    if name == "wires":
        yield from wire_rows(case, place, results)
    if name.startswith("tensors-"):
        yield from thread_rows(case, results)
    for way, phases in results[0]["phases_s"].items():
        for phase in phases:
            ms = Spread.of(results, lambda r, w=way, p=phase: r["phases_s"][w][p], 1e3)  # type: ignore[misc]
            yield row_of(case, f"{way} {phase}", ms)


def reduced_s(found: Found, way: str) -> float:
    """Seconds from gradients that are ready to the optimizer that has the averages."""
    seconds = found["seconds"]
    return float(seconds[way] - seconds["alone"]) if way != "alone" else float(seconds[way])


def dense_s(found: Found) -> float:
    """The same of the faster plain dense way."""
    return min(reduced_s(found, way) for way in PLAIN_DENSE if way in found["seconds"])


def way_row(case: str, way: str, place: str, ranks: int, results: list[Found]) -> Row:
    ms = Spread.of(results, lambda found: reduced_s(found, way), 1e3)
    if way == "alone":
        return row_of(case, "backward alone, subtracted from the others", ms)
    dense = Spread.of(results, dense_s, 1e3)
    names = " and ".join(name for name in PLAIN_DENSE if name in results[0]["seconds"])
    factor = Spread.of(results, lambda found: dense_s(found) / reduced_s(found, way)).middle
    method, _, density = way.partition("@")
    is_goal = case.startswith("buckets") and method == "oktopk"
    goal = LEAST_FACTORS.get((place, ranks, density)) if is_goal else None
    return row_of(
        case,
        f"{way}, through the optimizer",
        ms,
        baseline=f"dense, the faster of {names}: {dense.middle:.1f} ms",
        ratio=factor,
        goal=None if goal is None else f"at least {goal:g} ×",
        met=None if goal is None else factor >= goal,
    )


def bucket_rows(case: str, way: str, results: list[Found]) -> Iterator[Row]:
    """Several buckets against one."""
    single = f"{way}#1"
    one = Spread.of(results, lambda found: reduced_s(found, single), 1e3)
    for buckets in (2, 4):
        name = f"{way}#{buckets}"
        share = Spread.of(results, lambda r, n=name: reduced_s(r, n) / reduced_s(r, single))  # type: ignore[misc]
        yield row_of(
            case,
            f"{way} in {buckets} buckets over one bucket",
            share,
            "×",
            baseline=f"one bucket: {one.middle:.1f} ms",
            goal=f"at most {MOST_FOR_FOUR_BUCKETS:g} ×",
            met=share.middle <= MOST_FOR_FOUR_BUCKETS,
        )


def wire_rows(case: str, place: str, results: list[Found]) -> Iterator[Row]:
    """Half the bytes for a value, and gaps for indices."""
    goal = LEAST_FOR_HALF_WIRE.get(place)
    for density in DENSITIES:
        plain, short = (f"oktopk@{density}/{wire}" for wire in ("float32", "float16+gap"))
        factor = Spread.of(
            results,
            lambda r, p=plain, s=short: reduced_s(r, p) / reduced_s(r, s),  # type: ignore[misc]
        )
        yield row_of(
            case,
            f"how much faster {short} is than float32",
            factor,
            "×",
            goal=None if goal is None else f"at least {goal:g} ×",
            met=None if goal is None else factor.middle >= goal,
        )


def thread_rows(case: str, results: list[Found]) -> Iterator[Row]:
    """What many small tensors cost the thread that trains; where Horovod spins, that counts."""

    def own(found: Found, way: str) -> float:
        seconds = found["thread_seconds"]
        return float(seconds[way] - seconds["alone"])

    plain = Spread.of(results, lambda found: own(found, "horovod"), 1e3)
    for way in results[0]["thread_seconds"]:
        if way in ("alone", "horovod"):
            continue
        share = Spread.of(results, lambda r, w=way: own(r, w) / own(r, "horovod"))  # type: ignore[misc]
        yield row_of(
            case,
            f"{way}, main thread's own time over plain Horovod's",
            share,
            "×",
            baseline=f"plain Horovod: {plain.middle:.2f} ms",
            goal=f"at most {MOST_FOR_SMALL_TENSORS:g} ×",
            met=share.middle <= MOST_FOR_SMALL_TENSORS,
        )


def row_of(case: str, metric: str, figure: Spread, unit: str = "ms", **facts: Any) -> Row:
    """A row for the median of several launches."""
    return Row(
        case,
        metric,
        figure.middle,
        unit,
        spread=(figure.least, figure.most),
        launches=figure.launches,
        **facts,
    )
