"""`hvd-sparse simulate`: the collectives on many virtual ranks of a simulated network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hvd_sparse.checks import check_choice, check_count, check_share
from hvd_sparse.cli.command import Command, Output, bytes_per_s, seconds
from hvd_sparse.collectives.registry import STREAMED
from hvd_sparse.collectives.two_levels import shared
from hvd_sparse.cost_model import Link
from hvd_sparse.errors import ConfigError, say
from hvd_sparse.lab.plots import load_pyplot, plot_outcomes
from hvd_sparse.lab.simulator import (
    ALGORITHMS,
    Network,
    SimulatedOutcome,
    SyntheticStreams,
    Workload,
    simulate_all,
)
from hvd_sparse.tables import table

COLUMNS = (
    *("algorithm", "ranks", "words sent, worst", "mean", "words received, worst", "mean"),
    *("words of a card", "messages", "exchange", "step", "efficiency"),
)
"""Words are of four bytes, per rank and step; those of a card are received, per host."""

MOST_RANKS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", default="2,4,8,16", help="numbers of ranks (default: %(default)s)")
    add(
        "--algorithms",
        default="all",
        help=f"all, or some of {','.join(ALGORITHMS)} (default: %(default)s)",
    )
    add("--numel", type=int, default=1_000_000, help="elements (default: %(default)s)")
    add("--density", type=float, default=0.01, help="k/n (default: %(default)s)")
    add("--compute", type=float, default=0.0, metavar="S", help="seconds before the exchange")
    add("--steps", type=int, default=2, help="steps; the last is measured (default: %(default)s)")
    add("--stretch", type=float, help="elements that one stands for (default: as memory needs)")
    add("--jobs", type=int, help="processes (default: one per core where worlds are large)")
    add("--plot", type=Path, metavar="FILE", help="draw time, volume and efficiency")

    add = parser.add_argument_group("network").add_argument
    for number, words, unit, default, meaning in (
        ("--alpha", "--latency", seconds, 1e-4, "of a message"),
        ("--beta", "--bandwidth", seconds_per_byte, 8e-9, "per byte of a host's card"),
    ):
        name = number.removeprefix("--")
        add(number, type=float, default=default, help=f"seconds {meaning} (default: %(default)s)")
        add(words, dest=name, type=unit, metavar="VALUE", help="the same, as `plan` takes it")
    add(
        "--gamma",
        type=float,
        default=0.0,
        help="seconds per byte merged, added or scanned (default: %(default)s)",
    )
    add("--gap", type=float, help="seconds that a message occupies the card (default: alpha)")
    add("--local", type=int, default=1, help="ranks per host (default: %(default)s)")
    add("--local-alpha", type=float, default=1e-5, help="alpha in a host (default: %(default)s)")
    add("--local-beta", type=float, default=1e-10, help="beta in a host (default: %(default)s)")
    add(
        "--hierarchical",
        action="store_true",
        help="simulate two levels, too: dense sums in the hosts, the algorithm between them",
    )
    add("--slow-rank", type=int, help="a rank that is slower than the others")
    add("--slow-factor", type=float, default=2.0, help="by how much (default: %(default)s)")

    add = parser.add_argument_group("streams").add_argument
    add("--overlap", type=float, default=0.0, help="share of indices that all ranks have")
    add("--skew", type=float, default=0.0, help="how indices crowd at the start, from 0 (evenly)")
    add("--region", type=float, default=1.0, help="share of the vector that has all indices")
    add("--loud", type=float, default=0.0, help="share of entries, the first, with large values")
    add("--seed", type=int, default=0, help="seed of the streams (default: %(default)s)")


def seconds_per_byte(rate: str) -> float:
    """Parse a rate, `1gbit` for example, as the time of a byte."""
    return 1 / bytes_per_s(rate)


def run(options: argparse.Namespace) -> Output:
    """Simulate every algorithm on every world."""
    network = _network(options)
    numel = check_count("--numel", options.numel, 1)
    if numel >= 2**31:  # indices have 32 bits
        raise ConfigError(f"--numel must be below 2**31, got {numel}")
    k = max(1, round(check_share("density", options.density) * numel))
    workload = Workload(options.numel, k, options.compute, options.hierarchical)
    streams = SyntheticStreams(
        options.overlap, options.skew, options.region, options.loud, options.seed
    )
    algorithms = list(STREAMED) if options.algorithms == "all" else options.algorithms.split(",")
    for name in algorithms:
        check_choice("--algorithms", name, ALGORITHMS)
    if options.plot:
        load_pyplot(options.plot)  # fails now, not after all the work
    outcomes = simulate_all(
        *(algorithms, _numbers("--ranks", options.ranks), workload, network, streams),
        steps=options.steps,
        stretch=options.stretch,
        jobs=options.jobs,
        hierarchical=(False, True) if options.hierarchical else (False,),
        progress=say,
    )
    title = (
        f"n = {workload.numel:,}, k = {workload.k:,}, α = {options.alpha:g} s, "
        f"β = {options.beta:g} s/byte, γ = {options.gamma:g} s/byte, "
        f"{workload.compute_s:g} s of computing"
    )
    if options.plot:
        plot_outcomes(outcomes, title, options.plot)
    report = {
        "workload": asdict(workload),
        "network": asdict(network),
        "rows": [asdict(outcome) for outcome in outcomes],
    }
    return Output(report, f"{title}\n\n{outcome_table(outcomes)}")


def outcome_table(outcomes: Sequence[SimulatedOutcome]) -> str:
    """The outcomes as text. Words and messages are per rank and step."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for o in outcomes:
        words = (o.sent_words, o.received_words)
        rows.append(
            (
                o.label,
                str(o.world_size),
                *(f"{figure:,.0f}" for w in words for figure in (w.worst, w.mean)),
                f"{o.card_words.worst:,.0f}",
                f"{o.messages.worst:,.0f}",
                f"{o.exchange_s * 1e3:.4g} ms",
                f"{o.step_s * 1e3:.4g} ms",
                "" if o.efficiency is None else f"{o.efficiency:.1%}",
            )
        )
    return table(rows)


def _network(options: argparse.Namespace) -> Network:
    local_size = check_count("--local", options.local, 1)
    gap_s = None if options.gap is None else min(options.gap, options.local_alpha)
    inside = Link(options.local_alpha, options.local_beta, gap_s=gap_s)
    return Network(
        shared(Link(options.alpha, options.beta, options.gamma, options.gap), local_size),
        local_size,
        inside if local_size > 1 else None,
        options.slow_rank,
        options.slow_factor,
    )


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} must be whole numbers with commas, got {text!r}") from error
    if max(numbers) > MOST_RANKS:
        raise ConfigError(f"{name} must be at most {MOST_RANKS}, got {max(numbers)}")
    return [check_count(name, number, 1) for number in numbers]


SIMULATE = Command(
    name="simulate",
    summary="simulate the collectives on up to 1,024 ranks of a network",
    examples=(
        "hvd-sparse simulate --ranks 2,4,8,16,32 --numel 14700000 --density 0.001",
        "hvd-sparse simulate --ranks 32,64,128,256 --numel 133547324 --density 0.01 "
        "--alpha 1.5e-6 --beta 1e-9 --compute 0.25 --plot scaling.png --json scaling.json",
        "hvd-sparse simulate --ranks 64 --local 8 --hierarchical --algorithms oktopk,topk_dsa",
    ),
    add_arguments=add_arguments,
    run=run,
    json_file=True,
)
