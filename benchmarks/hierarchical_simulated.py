"""Two levels compared with flat at BERT's size, on simulated hosts of eight ranks.

    python -m benchmarks.hierarchical_simulated --json FILE --plot docs/hierarchical.png

What the simulation assumes:

* BERT, 133,547,324 parameters at density 0.01; all ranks share a tenth of the indices.
* Hosts of eight ranks with one card of 25 Gb/s, which ranks share while they use it at the same
  time; α = 10 µs between hosts, not shared.
* 300 GB/s and 5 µs between two ranks of a host, as between devices on one board.
* γ = 5 ps to merge, add or scan a byte: 200 GB/s, a tenth of a device's memory bandwidth.
* Selection is one pass that adds and one that scans: over n values flat, in two levels a shard.

The dense baseline is a ring over all ranks, like Horovod's, which passes through every card once.
Its figures, and those of the rows that say "cost model", are computed from formulas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Row, write_report
from hvd_sparse.collectives.registry import LOSSLESS_CANDIDATES
from hvd_sparse.collectives.two_levels import Levels, flat, shared, two_levels
from hvd_sparse.cost_model import Link
from hvd_sparse.files import replacing
from hvd_sparse.lab.offline_plan import dense_ring
from hvd_sparse.lab.plots import load_pyplot
from hvd_sparse.lab.simulator import (
    Network,
    SimulatedOutcome,
    SyntheticStreams,
    Workload,
    simulate_all,
)

NUMEL, DENSITY, LOCAL_SIZE = 133_547_324, 0.01, 8
K = round(DENSITY * NUMEL)
GBIT_S = 25.0
BETWEEN = Link(1e-5, 8 / (GBIT_S * 1e9), 5e-12)
INSIDE = Link(5e-6, 1 / 300e9)
STREAMS = SyntheticStreams(overlap=0.1)
ALGORITHMS = ("dense", "topk_dsa", "oktopk")
CANDIDATES = (*LOSSLESS_CANDIDATES, "oktopk", "spardl")
RING = "dense, a ring"
CARDS_GBIT_S = (1.0, 10.0, 25.0, 100.0, 400.0)
INSIDES = {"300 GB/s inside": INSIDE, "5 GB/s inside": Link(1e-5, 1 / 5e9)}


def levels_of(count: int, card: Link = BETWEEN, inside: Link = INSIDE) -> Levels:
    """Hosts of eight ranks."""
    return Levels(count, LOCAL_SIZE, shared(card, LOCAL_SIZE), inside)


def case_of(count: int) -> str:
    """One world in words."""
    return f"BERT, {count} hosts x {LOCAL_SIZE}, {GBIT_S:g} Gb/s"


def simulated_rows(outcomes: Sequence[SimulatedOutcome]) -> Iterator[Row]:
    """Seconds and bytes of each form, two levels against flat."""
    flat_forms = {(o.algorithm, o.world_size): o for o in outcomes if not o.is_hierarchical}
    for o in outcomes:
        case = case_of(o.world_size // LOCAL_SIZE)
        one = flat_forms[o.algorithm, o.world_size]
        for metric, unit, figure, baseline in (
            ("reduction", "ms", o.exchange_s * 1e3, one.exchange_s * 1e3),
            ("received by a card", "MB", o.card_words.worst * 4e-6, one.card_words.worst * 4e-6),
        ):
            yield Row(
                *(case, f"{o.label}: {metric}", figure, unit),
                baseline=f"flat: {baseline:.4g} {unit}" if o.is_hierarchical else None,
                ratio=baseline / figure if o.is_hierarchical else None,
            )
    for count in sorted({o.world_size // LOCAL_SIZE for o in outcomes}):
        dense = dense_ring(levels_of(count), NUMEL)
        yield Row(case_of(count), f"{RING}: reduction", dense.seconds * 1e3, "ms")
        yield Row(case_of(count), f"{RING}: received by a card", dense.card_bytes * 1e-6, "MB")


def model_rows(count: int) -> Iterator[Row]:
    """By the cost model: the quickest of each form, for other cards and slower insides."""
    for words, inside in INSIDES.items():
        for gbit_s in CARDS_GBIT_S:
            levels = levels_of(count, replace(BETWEEN, beta_s_per_byte=8 / (gbit_s * 1e9)), inside)
            one, other = (
                min((form(name, levels, NUMEL, K).seconds, name) for name in CANDIDATES)
                for form in (flat, two_levels)
            )
            yield Row(
                f"cost model, {count} hosts x {LOCAL_SIZE}, {gbit_s:g} Gb/s, {words}",
                f"two levels, {other[1]}",
                other[0] * 1e3,
                "ms",
                baseline=f"flat, {one[1]}: {one[0] * 1e3:.4g} ms",
                ratio=one[0] / other[0],
            )


def plot(outcomes: Sequence[SimulatedOutcome], path: Path) -> None:
    """Draw seconds and bytes against the number of hosts: solid in two levels, dashed flat."""
    pyplot = load_pyplot()
    figure, every = pyplot.subplots(1, 2, figsize=(11, 4.2))
    counts = sorted({o.world_size // LOCAL_SIZE for o in outcomes})
    panels = (
        ("a reduction, selection included, ms", 1e3, 0),
        ("received by a host's card, MB", 1e-6, 1),
    )
    for axes, (label, scale, part) in zip(every, panels, strict=True):
        for number, name in enumerate(ALGORITHMS):
            for levels in (False, True):
                chosen = [o for o in outcomes if (o.algorithm, o.is_hierarchical) == (name, levels)]
                points = sorted(
                    (o.world_size // LOCAL_SIZE, (o.exchange_s, 4 * o.card_words.worst)[part])
                    for o in chosen
                )
                axes.plot(
                    [count for count, _ in points],
                    [scale * value for _, value in points],
                    marker="o",
                    color=f"C{number}",
                    linestyle="-" if levels else "--",
                    label=f"{name}, {'two levels' if levels else 'flat'}",
                )
        rings = [dense_ring(levels_of(count), NUMEL) for count in counts]
        dense = [scale * (each.seconds, each.card_bytes)[part] for each in rings]
        axes.plot(counts, dense, color="black", label=RING)
        axes.set(xscale="log", yscale="log", xlabel="hosts of 8 ranks", ylabel=label)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    curves, names = every[0].get_legend_handles_labels()
    figure.legend(curves, names, loc="lower center", ncols=4, fontsize="small")
    figure.suptitle(
        f"Simulated: BERT, n = {NUMEL:,}, density {DENSITY}; a {GBIT_S:g} Gb/s card for 8 ranks, "
        "300 GB/s inside"
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
    pyplot.close(figure)


def main() -> None:
    """Simulate, print the table, write the JSON, draw the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--plot", type=Path, help="where the curves are drawn")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--stretch", type=float, help="elements that one stands for")
    parser.add_argument("--jobs", type=int, help="processes (default: the cores)")
    options = parser.parse_args()
    if options.plot:
        load_pyplot()
    outcomes = simulate_all(
        ALGORITHMS,
        [count * LOCAL_SIZE for count in options.hosts],
        Workload(NUMEL, K, encodes=True),
        Network(shared(BETWEEN, LOCAL_SIZE), LOCAL_SIZE, INSIDE),
        STREAMS,
        stretch=options.stretch,
        jobs=options.jobs,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        hierarchical=(False, True),
    )
    if options.plot:
        plot(outcomes, options.plot)
    rows = [*simulated_rows(outcomes), *model_rows(max(options.hosts))]
    write_report("hierarchical_simulated", rows, options.json)


if __name__ == "__main__":
    main()
