"""One algorithm on one world: what each rank sends and receives, and when the last one is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from multiprocessing import get_context
from typing import Any

from hvd_sparse.checks import check_at_least, check_choice, check_count
from hvd_sparse.collectives.registry import BY_NAME, STREAMED, cost, names_of
from hvd_sparse.collectives.two_levels import applied_entries
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.simulator.forms import Flat, TwoLevels, check_hosts
from hvd_sparse.lab.simulator.network import Clock, Network
from hvd_sparse.lab.simulator.scheduler import Pick, first_come
from hvd_sparse.lab.simulator.simulated_transport import SimulatedTransport, SimulatedWorld
from hvd_sparse.lab.simulator.workloads import StreamSource
from hvd_sparse.transports import Traffic
from hvd_sparse.wire import PLAIN, Wire

DISTINCT = STREAMED
"""What can be simulated: what exchanges streams, with a formula that tells the memory it takes."""

ALGORITHMS = names_of(lambda entry: entry.name in DISTINCT, aliases=True)
"""The same by all their names."""

LARGE_WORLD = 64
"""From so many ranks on, a simulation takes longer than starting a process for it."""

WORLD_WORDS = 1 << 27
"""Words that all ranks of a simulation may receive in a step: a few GiB of memory."""


@dataclass(frozen=True)
class Workload:
    """What every rank brings to a step.

    Attributes:
        numel: n.
        k: Entries of a rank's stream, in `[0, numel]`.
        compute_s: Seconds that a rank computes before the exchange.
        encodes: Whether what a rank computes to select its entries counts, too (`encoding`).
    """

    numel: int
    k: int
    compute_s: float = 0.0
    encodes: bool = False

    def __post_init__(self) -> None:
        check_count("numel", self.numel, 1)
        check_at_least("compute_s", self.compute_s, 0.0)
        if not 0 <= self.k <= self.numel:
            raise ConfigError(f"k must be in [0, numel = {self.numel}], got {self.k!r}")


@dataclass(frozen=True)
class Spread:
    """A figure over the ranks."""

    worst: float
    mean: float


@dataclass(frozen=True)
class Outcome:
    """One algorithm on one world; words, messages and seconds are those of one step.

    Attributes:
        algorithm: Its name.
        world_size: P.
        stretch: How many elements of the workload an element of the simulation stood for.
        sent_words: Words of four bytes that a rank sends, headers included.
        received_words: Words that a rank receives.
        messages: Messages that a rank sends.
        step_s: Until the last rank is done, computing included.
        exchange_s: The same without the computing.
        first_step_s: The first step, in which Ok-Topk finds its regions and threshold.
        result_nnz: Entries of the sum.
        card_words: Words that a host's card receives, headers included.
        is_hierarchical: Whether the algorithm ran between hosts, on shards.
        efficiency: Parallel efficiency in weak scaling, against the smallest world simulated with
            the same algorithm; None before `with_efficiency`, and where that takes no time.
    """

    algorithm: str
    world_size: int
    stretch: float
    sent_words: Spread
    received_words: Spread
    messages: Spread
    step_s: float
    exchange_s: float
    first_step_s: float
    result_nnz: float
    card_words: Spread
    is_hierarchical: bool = False
    efficiency: float | None = None

    @property
    def label(self) -> str:
        """What ran, in words."""
        return f"{self.algorithm}, two levels" if self.is_hierarchical else self.algorithm


def automatic_stretch(
    algorithm: str, world_size: int, workload: Workload, shards: int = 1
) -> float:
    """The least stretch with which all that the ranks receive fits into memory.

    Args:
        algorithm: Its name.
        world_size: P.
        workload: What every rank brings.
        shards: L for two levels: what the ranks of a host gather counts, too.
    """
    ranks, numel, k = world_size // shards, workload.numel // shards, workload.k // shards
    words = cost(algorithm, ranks, numel, k).expected.words
    words += 2 * (shards - 1) * min(numel / 2, applied_entries(algorithm, ranks, numel, k))
    fitting = ceil(words * world_size / WORLD_WORDS)
    return float(max(1, min(fitting, workload.numel)))


def simulate(
    algorithm: str,
    world_size: int,
    workload: Workload,
    network: Network,
    streams: StreamSource,
    *,
    steps: int = 2,
    stretch: float | None = None,
    wire: Wire = PLAIN,
    pick: Pick = first_come,
    hierarchical: bool = False,
) -> Outcome:
    """Run some steps of an algorithm, and measure the last one.

    All ranks begin every step at the same time.

    Args:
        algorithm: One of `ALGORITHMS`.
        world_size: P, at least 1.
        workload: What every rank brings.
        network: What connects the ranks.
        streams: The entries that every rank brings.
        steps: At least 1; 2 show what Ok-Topk does between exact thresholds. An algorithm that
            keeps no state does the same in each, and runs once.
        stretch: Simulate vectors that are shorter by this factor, and take every byte of them for
            as many (see `SimulatedTransport`); None: the least that fits into memory.
        wire: The form of the messages.
        pick: See `Scheduler`; makes no difference.
        hierarchical: In two levels: dense sums inside the network's hosts, the algorithm between
            them on a shard for each local rank, a gather inside.

    Raises:
        ConfigError: An argument is out of its range.
        AssertionError: The ranks ended with different results.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_count("world_size", world_size, 1)
    check_count("steps", steps, 1)
    if network.slow_rank is not None and network.slow_rank >= world_size:
        raise ConfigError(f"slow_rank must be below {world_size}, got {network.slow_rank}")
    if hierarchical:
        check_hosts(world_size, network.local_size)
    shards = network.local_size if hierarchical else 1
    if stretch is None:
        stretch = automatic_stretch(algorithm, world_size, workload, shards)
    entry = BY_NAME[algorithm]
    world = SimulatedWorld(world_size, network, stretch, pick, entry.control_bytes)
    numel, k = round(workload.numel / stretch), round(workload.k / stretch)
    k = max(k, min(1, workload.k))

    def one_rank(transport: SimulatedTransport) -> list[_Step]:
        form = (TwoLevels if hierarchical else Flat)(transport, entry, numel, k, wire, streams)
        begin_s = workload.compute_s * network.slowness(transport.rank)
        done = []
        for step in range(steps if entry.keeps_state else 1):
            transport.clock = Clock(network, transport.rank, begin_s)
            before, abroad = transport.traffic.snapshot(), transport.abroad.snapshot()
            nnz, digest = form.take_step(step, encodes=workload.encodes)
            spent = transport.traffic.since(before), transport.abroad.since(abroad)
            done.append(_Step(transport.clock.now_s, *spent, nnz, digest))
        return done

    ranks = world.run(one_rank)
    last = [done[-1] for done in ranks]
    if len({step.digest for step in last}) > 1:
        raise AssertionError(f"{algorithm} on {world_size} ranks: they have different results")
    slowest_s = max(network.slowness(rank) for rank in range(world_size)) * workload.compute_s
    step_s = max(step.end_s for step in last)
    return Outcome(
        algorithm,
        world_size,
        stretch,
        _spread([step.spent.bytes_sent / 4 for step in last]),
        _spread([step.spent.bytes_received / 4 for step in last]),
        _spread([step.spent.messages_sent for step in last]),
        step_s,
        step_s - slowest_s,
        max(done[0].end_s for done in ranks),
        sum(step.nnz for step in last[:shards]) * stretch,
        _spread(_by_host([step.abroad.bytes_received / 4 for step in last], network.local_size)),
        hierarchical,
    )


def simulate_all(
    algorithms: Sequence[str],
    world_sizes: Sequence[int],
    workload: Workload,
    network: Network,
    streams: StreamSource,
    *,
    steps: int = 2,
    stretch: float | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    hierarchical: Sequence[bool] = (False,),
) -> list[Outcome]:
    """Every algorithm on every world, with its parallel efficiency; arguments as in `simulate`.

    Args:
        algorithms: Some of `ALGORITHMS`.
        world_sizes: Numbers of ranks.
        workload: See `simulate`.
        network: See `simulate`.
        streams: See `simulate`.
        steps: See `simulate`.
        stretch: See `simulate`.
        jobs: Simulations that run at a time, each in a process; None: one for each core where a
            world is large, else one in this process. Makes no difference to what is simulated.
        progress: Is told of each simulation that is done.
        hierarchical: False for the flat form, True for two levels; or both.
    """
    if jobs is None:
        jobs = (os.cpu_count() or 1) if max(world_sizes, default=0) >= LARGE_WORLD else 1
    cases = [
        (name, world_size, levels)
        for world_size in world_sizes
        for name in algorithms
        for levels in hierarchical
    ]

    def finished(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        for outcome in outcomes:
            progress(f"simulated {outcome.label} on {outcome.world_size} ranks")
            yield outcome

    shared = (workload, network, streams, steps, stretch)
    tasks = [(name, world_size, *shared, levels) for name, world_size, levels in cases]
    if check_count("jobs", jobs, 1) == 1:
        return with_efficiency(list(finished(map(_simulate_task, tasks))))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return with_efficiency(list(finished(pool.map(_simulate_task, tasks))))


def _simulate_task(task: tuple[Any, ...]) -> Outcome:
    *arguments, steps, stretch, levels = task
    return simulate(*arguments, steps=steps, stretch=stretch, hierarchical=levels)


def with_efficiency(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with their parallel efficiency: the smallest world's time over theirs."""
    base_s: dict[str, float] = {}
    for outcome in sorted(outcomes, key=lambda o: o.world_size):
        base_s.setdefault(outcome.label, outcome.step_s)
    return [
        replace(o, efficiency=base_s[o.label] / o.step_s)
        if base_s[o.label] > 0
        else replace(o, efficiency=None)
        for o in outcomes
    ]


@dataclass(frozen=True)
class _Step:
    end_s: float
    spent: Traffic
    abroad: Traffic
    nnz: int
    digest: int


def _by_host(values: list[float], local_size: int) -> list[float]:
    """Sums over the ranks of each host."""
    return [sum(values[i : i + local_size]) for i in range(0, len(values), local_size)]


def _spread(values: list[float]) -> Spread:
    return Spread(max(values), sum(values) / len(values))
