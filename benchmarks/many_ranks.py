"""Which allreduce is fastest on 16 to 1,024 ranks: one exchange, on networks of nine kinds.

    python -m benchmarks.many_ranks --json FILE
    python -m benchmarks.many_ranks --json FILE --ranks 16 64 --simulate --pattern "own expert"

Every rank has k = 250,000 of n = 25 M entries and a host of its own. α is the time of a message; a
message sent while another one is under way takes as long. Computing takes no time. Times are those
of the cost model; `tests/test_cost_model.py` holds it to the simulator. With `--simulate` the
collectives themselves run on virtual ranks, one process per core, and their times are given.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.patterns import PATTERNS, PatternStreams
from benchmarks.report import Row, write_report
from hvd_sparse.collectives.registry import STREAMED, cost
from hvd_sparse.cost_model import Link
from hvd_sparse.lab.simulator import Network, Workload, simulate_all

NUMEL, K = 25_000_000, 250_000
RANKS = (16, 32, 64, 128, 256, 512, 1024)
ALPHAS_US = (10, 50, 200)
GIGABITS = (1, 10, 100)
OURS = "spardl"


def seconds_of(link: Link, options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """By number of ranks and algorithm: the seconds of an exchange."""
    if not options.simulate:
        return {
            P: {name: cost(name, P, NUMEL, K).expected.seconds(link) for name in STREAMED}
            for P in options.ranks
        }
    outcomes = simulate_all(
        *(STREAMED, options.ranks, Workload(NUMEL, K), Network(link)),
        PatternStreams(pattern=options.pattern),
        steps=4,
        stretch=options.stretch,
    )
    found: dict[int, dict[str, float]] = {P: {} for P in options.ranks}
    for outcome in outcomes:
        found[outcome.world_size][outcome.algorithm] = outcome.exchange_s
    return found


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each algorithm on each world, and which one is fastest."""
    for alpha_us in ALPHAS_US:
        for gigabits in GIGABITS:
            link = Link(alpha_us * 1e-6, 8e-9 / gigabits)
            for P, seconds in seconds_of(link, options).items():
                case = f"P={P}, {alpha_us} µs, {gigabits} Gb/s"
                for name, taken in seconds.items():
                    yield Row(case, name, round(taken * 1e3, 3), "ms")
                others = [each for name, each in seconds.items() if name != OURS]
                yield Row(
                    case,
                    f"{OURS}, over the best of the others",
                    round(min(others) / seconds[OURS], 2),
                    "×",
                    baseline=min((each, name) for name, each in seconds.items())[1] + " is fastest",
                )


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--simulate", action="store_true", help="run the collectives themselves")
    parser.add_argument("--pattern", choices=PATTERNS, default="uniform")
    parser.add_argument("--stretch", type=float, default=25.0, help="elements that one stands for")
    options = parser.parse_args()
    write_report("many_ranks", list(rows_of(options)), options.json)


if __name__ == "__main__":
    main()
