"""Step time as planned, against plain Horovod and against compressing everything.

    python -m benchmarks.planner --json FILE
    python -m benchmarks.planner --json FILE --netlab 100mbit 1gbit 10gbit --models cnn

Every model is trained in every way, each a real job under the unmodified horovodrun: on loopback,
or with `--netlab` between the hosts of a network lab (tools/netlab; needs root).
benchmarks/planner_worker.py is what runs. The promise is that a planned step is never more than 3 %
slower than plain Horovod's.
`uncompressed` is this package with nothing compressed: dense steps whose waits do not spin.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks._launch import Launcher
from benchmarks._report import Row, write_report

MODELS = ("cnn", "transformer", "single")
COLLECTIVES = (
    *("topk_allgather", "oktopk", "gtopk"),
    *("ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather"),
)
MOST_LOSS = 0.03
WITHIN_BEST = 0.10
WITHIN_PREDICTION = 0.25


def launch(at: Launcher, model: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one way in one world, and return what its rank 0 wrote."""
    arguments = ["--model", model, "--way", way]
    arguments += ["--steps", str(options.steps), "--seconds", str(options.seconds)]
    arguments += ["--single-numel", str(options.single_numel)]
    return at.run("benchmarks/planner_worker.py", options.ranks, arguments)


def measure(at: Launcher, model: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every way, its launches in turn; the median launch by its step time counts."""
    launches: dict[str, list[dict[str, Any]]] = {}
    for launch_number in range(options.launches):
        is_first = launch_number < options.collective_launches
        others = ("uncompressed", *options.collectives) if is_first else ()
        for way in ("dense", "planned", *others):
            print(
                f"{at.place}, {model}, {way}: launch {launch_number + 1} of {options.launches} …",
                file=sys.stderr,
                flush=True,
            )
            launches.setdefault(way, []).append(launch(at, model, way, options))
    return {
        way: sorted(found, key=lambda result: result["step_s"])[len(found) // 2]
        for way, found in launches.items()
    }


def rows_of(case: str, results: dict[str, dict[str, Any]]) -> list[Row]:
    """The promise, the best of all ways, the prediction, and every way for itself."""
    step_s = {way: result["step_s"] for way, result in results.items()}
    planned = results["planned"]
    others = [way for way in step_s if way != "planned"]
    best = min(others, key=lambda way: step_s[way])
    what = f"{planned['sparse_tensors']} tensors sparse"
    rows = [
        Row(
            case=case,
            metric=f"planned step, {what}",
            value=1e3 * step_s["planned"],
            unit="ms",
            baseline=f"plain Horovod, dense: {1e3 * step_s['dense']:.1f} ms",
            ratio=step_s["dense"] / step_s["planned"],
            goal=f"at most {100 * MOST_LOSS:.0f} % slower",
            met=step_s["planned"] <= (1 + MOST_LOSS) * step_s["dense"],
        ),
        Row(
            case=case,
            metric="planned step",
            value=1e3 * step_s["planned"],
            unit="ms",
            baseline=f"the best of all, {best}: {1e3 * step_s[best]:.1f} ms",
            ratio=step_s[best] / step_s["planned"],
            goal=f"within {100 * WITHIN_BEST:.0f} %",
            met=step_s["planned"] <= (1 + WITHIN_BEST) * step_s[best],
        ),
        prediction(case, "predicted step, by its trial", planned["tried_s"], step_s["planned"]),
        prediction(
            case, "predicted step, by costs alone", planned["predicted_s"], step_s["planned"]
        ),
    ]
    rows += [
        Row(
            case=case,
            metric=f"step, {way}",
            value=1e3 * seconds,
            unit="ms",
            ratio=step_s["dense"] / seconds,
            baseline="plain Horovod, dense",
        )
        for way, seconds in step_s.items()
        if way not in ("planned", "dense")
    ]
    return rows


def prediction(case: str, metric: str, predicted_s: float, measured_s: float) -> Row:
    """A step as the planner expected it."""
    return Row(
        case=case,
        metric=metric,
        value=1e3 * predicted_s,
        unit="ms",
        baseline=f"measured: {1e3 * measured_s:.1f} ms",
        ratio=measured_s / predicted_s,
        goal=f"within {100 * WITHIN_PREDICTION:.0f} %",
        met=abs(predicted_s / measured_s - 1) <= WITHIN_PREDICTION,
    )


def main() -> None:
    """Measure every case asked for, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--collectives", nargs="*", default=list(COLLECTIVES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a launch")
    parser.add_argument("--seconds", type=float, default=8.0, help="for which they go on, at most")
    parser.add_argument("--launches", type=int, default=3, help="of dense and of planned")
    parser.add_argument("--collective-launches", type=int, default=3, help="of the others")
    parser.add_argument("--single-numel", type=int, default=126_700_000 // 16)
    Launcher.add_arguments(parser, several=True)
    options = parser.parse_args()
    places = Launcher.each_of(parser, options)

    rows = []
    for at in places:
        with at.network(options.ranks):
            for model in options.models:
                results = measure(at, model, options)
                rows += rows_of(f"{model}, P={options.ranks}, {at.place}", results)
    write_report("planner", rows, options.json)


if __name__ == "__main__":
    main()
