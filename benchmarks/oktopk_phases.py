"""What Ok-Topk's balancing and overlap bring in each phase, like the paper's figure 7.

    python -m benchmarks.oktopk_phases --json FILE
    python -m benchmarks.oktopk_phases --json FILE --netlab 1gbit

Volumes are counted on virtual ranks: what the worst rank receives or sends. Times are those of the
slowest rank in real jobs under horovodrun. Streams are skewed, so that uniform regions are uneven.
benchmarks/oktopk_variants.py has what Ok-Topk is compared with, benchmarks/oktopk_phases_worker.py
is what runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks._launch import Launcher
from benchmarks._report import Row, write_report
from benchmarks.oktopk_variants import (
    MeasuredOkTopk,
    UniformLevelled,
    UniformUnbalanced,
    skewed_stream,
)
from hvd_sparse.transports import Transport, run_ranks

NUMEL = 14_700_000
DENSITY = 0.01
VOLUME_RANKS = (4, 16, 32)
VOLUME_NUMEL = 1_000_000
STEPS = 3
WORD_BYTES = 4
NAIVE = {
    "split and reduce": ("oktopk", "uniform regions, no levelling"),
    "balance and allgather": ("uniform regions, levelled", "uniform regions, no levelling"),
}
"""Per phase, what balances it, and what does not. Levelling is for shares that are uneven, which
balanced regions leave few of."""

TIMED = {
    "split and reduce": [
        ("oktopk", "uniform regions, no levelling"),
        ("oktopk", "not overlapped"),
        ("oktopk", "not rotated"),
    ],
    "balance and allgather": [
        ("oktopk", "uniform regions, no levelling"),
        ("uniform regions, levelled", "uniform regions, no levelling"),
    ],
}
"""Per phase, whose time is compared with whose."""


def worst_words(variant: type[MeasuredOkTopk], P: int, numel: int, k: int) -> dict[str, float]:
    """Words that the busiest rank receives or sends in each phase, averaged over some steps."""

    def worker(transport: Transport) -> list[dict[str, int]]:
        collective = variant(transport, numel, k)
        steps = []
        for step in range(STEPS + 1):
            collective.reduce(skewed_stream(transport.rank, step, numel, k))
            steps.append(
                {
                    phase: max(spent.bytes_sent, spent.bytes_received) // WORD_BYTES
                    for phase, spent in collective.traffic.items()
                }
            )
        return steps[1:]  # the first one evaluates thresholds and boundaries

    ranks = run_ranks(P, worker, timeout_s=120.0)
    return {
        phase: sum(max(rank[step][phase] for rank in ranks) for step in range(STEPS)) / STEPS
        for phase in NAIVE
    }


def volume_rows(P: int, numel: int, density: float) -> list[Row]:
    """Both phases, balanced against naive."""
    k = max(1, round(density * numel))
    words = {
        "oktopk": worst_words(MeasuredOkTopk, P, numel, k),
        "uniform regions, levelled": worst_words(UniformLevelled, P, numel, k),
        "uniform regions, no levelling": worst_words(UniformUnbalanced, P, numel, k),
    }
    case = f"P={P} n={numel} density={density:g} virtual ranks, skewed"
    rows = [
        Row(
            *(case, f"{phase}, {ours}: words of the worst rank over k", words[ours][phase] / k),
            unit="words",
            baseline=f"{naive}: {words[naive][phase] / k:.2f} k",
            ratio=words[naive][phase] / words[ours][phase],
        )
        for phase, (ours, naive) in NAIVE.items()
    ]
    total = sum(words["oktopk"].values())
    naive_total = sum(words["uniform regions, no levelling"].values())
    bound = 6 * k * (P - 1) / P
    rows.append(
        Row(
            *(case, "both phases, oktopk: words of the worst rank over k", total / k, "words"),
            baseline=f"uniform regions, no levelling: {naive_total / k:.2f} k",
            ratio=naive_total / total,
            goal="at most 6k (P-1)/P and the control messages",
            met=total <= 1.1 * bound + 71 * P,
        )
    )
    return rows


def time_rows(P: int, numel: int, density: float, found: dict[str, Any], place: str) -> list[Row]:
    """Each phase with what it has, against the same without."""
    case = f"P={P} n={numel} density={density:g} {place}, skewed"
    return [
        Row(
            *(case, f"{phase}, {ours}", found[ours][phase] * 1e3, "ms"),
            baseline=f"{other}: {found[other][phase] * 1e3:.2f} ms",
            ratio=found[other][phase] / found[ours][phase],
        )
        for phase, pairs in TIMED.items()
        for ours, other in pairs
    ]


def main() -> None:
    """Count the volumes, time the phases, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--density", type=float, default=DENSITY)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--volume-ranks", type=int, nargs="*", default=list(VOLUME_RANKS))
    parser.add_argument("--volume-numel", type=int, default=VOLUME_NUMEL)
    parser.add_argument("--repeats", type=int, default=15)
    Launcher.add_arguments(parser)
    options = parser.parse_args()
    at = Launcher.of(parser, options)

    rows = []
    for P in options.volume_ranks:
        rows += volume_rows(P, options.volume_numel, options.density)
    arguments = ["--numel", str(options.numel), "--density", str(options.density)]
    arguments += ["--repeats", str(options.repeats)]
    for P in options.ranks:
        print(f"timing the phases on P = {P}, {at.place} …", file=sys.stderr, flush=True)
        with at.network(P):
            found = at.run("benchmarks/oktopk_phases_worker.py", P, [*arguments, *at.interface])
        rows += time_rows(P, options.numel, options.density, found, at.place)
    write_report("oktopk_phases", rows, options.json)


if __name__ == "__main__":
    main()
