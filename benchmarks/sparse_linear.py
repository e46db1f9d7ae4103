"""Linear models on naturally sparse data: an epoch with sparse gradients compared with a dense one.

    python -m benchmarks.sparse_linear --json FILE --netlab 1gbit

Runs examples/sparse_linear.py and examples/sparse_coordinates.py under horovodrun on 3.2 million
features, trigrams of text, as section 8.2 of SparCML does with its data. The dense training uses
`hvd.allreduce`, or `hvd.allgather` for coordinate descent, whose epoch is shortened here. Both must
end with the same weights, or the example fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks._launch import Launcher
from benchmarks.report import Row, write_report

SGD, DESCENT = "examples/sparse_linear.py", "examples/sparse_coordinates.py"
TRAININGS = {
    "logistic": (SGD, ("--loss", "logistic")),
    "hinge": (SGD, ("--loss", "hinge")),
    "logistic by coordinates, 50 iterations": (DESCENT, ("--iterations", "50")),
}
"""What is trained: by which script, with which arguments."""
GOALS = {("1gbit", 4): 5.0}
"""How many times as fast an epoch is to be, by rate and ranks."""


def rows_of(name: str, ranks: int, found: dict[str, Any], at: Launcher) -> list[Row]:
    """The rows of one training: epochs, exchanges, accuracy."""
    case = f"{name} P={ranks} {at.place}"
    sparse, dense = found["sparse"], found["dense"]
    by_sgd = TRAININGS[name][0] == SGD
    goal = GOALS.get((at.rate or "", ranks)) if by_sgd else None
    operation = "hvd.allreduce" if by_sgd else "hvd.allgather"
    rows = []
    for metric, key in (("epoch", "epoch_s"), ("exchanges of an epoch", "exchange_s")):
        ours_s, theirs_s = min(sparse[key]), min(dense[key])
        wanted = goal if key == "epoch_s" else None
        rows.append(
            Row(
                case,
                metric,
                ours_s * 1e3,
                "ms",
                baseline=f"dense {operation}: {theirs_s * 1e3:.0f} ms",
                ratio=theirs_s / ours_s,
                goal=None if wanted is None else f"at least {wanted:g} times as fast",
                met=None if wanted is None else theirs_s / ours_s >= wanted,
            )
        )
    same = sparse["accuracy"] == dense["accuracy"]
    baseline = f"dense: {dense['accuracy']:.4f}"
    rows.append(
        Row(case, "accuracy", sparse["accuracy"], "ratio", baseline, goal="the same", met=same)
    )
    entries = dense["entries_per_step"] / sparse["entries_per_step"]
    rows.append(
        Row(case, "entries of a gradient", sparse["entries_per_step"], "entries", ratio=entries)
    )
    return rows


def main() -> None:
    """Train with every loss, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dimension", type=int, default=3_231_961)
    Launcher.add_arguments(parser)
    options = parser.parse_args()
    at = Launcher.of(parser, options)
    arguments = ["--exchange", "both", "--epochs", str(options.epochs)]
    arguments += ["--dimension", str(options.dimension)]
    rows = []
    with at.network(options.ranks):
        for name, (script, more) in TRAININGS.items():
            print(f"training: {name} …", file=sys.stderr, flush=True)
            found = at.run(script, options.ranks, [*arguments, *more], out_option="--metrics")
            rows += rows_of(name, options.ranks, found, at)
    write_report("sparse_linear", rows, options.json)


if __name__ == "__main__":
    main()
