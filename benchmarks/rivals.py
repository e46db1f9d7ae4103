"""The exchanges of other papers' trainings, simulated at their size, density and number of ranks.

    python -m benchmarks.rivals --json benchmarks/results/rivals.json

docs/results.md sets this beside what the papers measured. A simulation has no selection, no noise
and no other jobs, so its times are no measurement's opponents; what it shows is the order of the
algorithms, and their words. What it takes for the networks:

* Ok-Topk (PPoPP '22), Piz Daint: as benchmarks/weak_scaling.py, where the reasons stand.
* SparCML (SC '19), eight nodes with Gigabit Ethernet: α = 50 µs, β = 8 ns a byte.
* DRAGONN (ICML '22), two machines with eight GPUs each and 25 Gb/s: α = 30 µs; of a machine's
  0.32 ns a byte each GPU has an eighth. Within a machine, PCIe: 5 µs, 0.1 ns a byte.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks._report import Row, write_report
from benchmarks.weak_scaling import EFFECTIVE, STREAMS
from hvd_sparse.cost_model import Link
from hvd_sparse.lab.simulator import Network, SyntheticStreams, Workload, simulate_all

OKTOPK_OPPONENTS = ("dense", "topk_allgather", "topk_dsa", "gtopk", "oktopk")
SPARCML = ("dense", "ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather")
GIGABIT = Network(Link(50e-6, 8e-9, 1e-10))
CLOUD = Network(Link(30e-6, 8 * 0.32e-9, 1e-10), local_size=8, inside=Link(5e-6, 1e-10, 1e-10))


@dataclass(frozen=True)
class Scenario:
    """What a paper reduced, and where.

    Attributes:
        case: What it is.
        algorithms: What is simulated.
        stretch: Elements that one stands for; counts and headers are not stretched.
    """

    case: str
    algorithms: tuple[str, ...]
    ranks: int
    workload: Workload
    network: Network
    streams: SyntheticStreams
    stretch: float


def scenario(
    case: str,
    algorithms: tuple[str, ...],
    ranks: int,
    numel: int,
    density: float,
    network: Network,
    streams: SyntheticStreams = STREAMS,
    compute_s: float = 0.0,
) -> Scenario:
    workload = Workload(numel, round(density * numel), compute_s)
    full = f"{case}: P={ranks}, n={numel:,}, density {density:g}"
    return Scenario(full, algorithms, ranks, workload, network, streams, stretch=32.0)


SCENARIOS = (
    scenario("Ok-Topk's VGG-16", OKTOPK_OPPONENTS, 32, 14_728_266, 0.02, EFFECTIVE),
    scenario("Ok-Topk's LSTM", OKTOPK_OPPONENTS, 64, 27_569_568, 0.02, EFFECTIVE),
    scenario(
        "SparCML's random vectors, Gigabit Ethernet",
        SPARCML,
        8,
        2**24,
        0.00781,
        GIGABIT,
        SyntheticStreams(),
    ),
    scenario(
        "DRAGONN's extreme classification",
        ("dense", "oktopk", "topk_allgather"),
        16,
        4096 * 30938,
        0.001,
        CLOUD,
        compute_s=0.025,
    ),
)


def rows_of(of: Scenario) -> Iterator[Row]:
    """Every algorithm's step, exchange and words."""
    outcomes = simulate_all(
        of.algorithms,
        [of.ranks],
        of.workload,
        of.network,
        of.streams,
        stretch=of.stretch,
        jobs=1,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    by_name = {outcome.algorithm: outcome for outcome in outcomes}
    dense = by_name["dense"]
    for name, outcome in by_name.items():
        yield Row(
            of.case,
            f"simulated exchange, {name}",
            outcome.exchange_s * 1e3,
            "ms",
            baseline=f"dense: {dense.exchange_s * 1e3:.1f} ms",
            ratio=dense.exchange_s / outcome.exchange_s,
        )
        yield Row(
            of.case,
            f"simulated words received by the worst rank, {name}",
            outcome.received_words.worst / 1e6,
            "million",
            baseline=f"dense: {dense.received_words.worst / 1e6:.2f} million",
            ratio=dense.received_words.worst / outcome.received_words.worst,
        )
        if of.workload.compute_s:
            yield Row(
                of.case,
                f"simulated step, {name}",
                outcome.step_s * 1e3,
                "ms",
                baseline=f"dense: {dense.step_s * 1e3:.1f} ms",
                ratio=dense.step_s / outcome.step_s,
            )


def main() -> None:
    """Simulate, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results are written")
    options = parser.parse_args()
    rows = [row for each in SCENARIOS for row in rows_of(each)]
    write_report("rivals", rows, options.json)


if __name__ == "__main__":
    main()
