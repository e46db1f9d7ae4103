"""One algorithm on one world: what each rank sends and receives, and when the last one is done."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from multiprocessing import get_context
from typing import Any

from hvd_sparse.checks import check_at_least, check_choice, check_count
from hvd_sparse.collectives.registry import BY_NAME, STREAMED, cost, names_of
from hvd_sparse.errors import ConfigError
from hvd_sparse.simulator.network import Clock, Network
from hvd_sparse.simulator.scheduler import Pick, first_come
from hvd_sparse.simulator.streams import StreamSource
from hvd_sparse.simulator.transport import SimulatedTransport, SimulatedWorld
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
    """

    numel: int
    k: int
    compute_s: float = 0.0

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
    efficiency: float | None = None


def automatic_stretch(algorithm: str, world_size: int, workload: Workload) -> float:
    """The least stretch with which all that the ranks receive fits into memory."""
    words = cost(algorithm, world_size, workload.numel, workload.k).expected.words
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

    Raises:
        ConfigError: An argument is out of its range.
        AssertionError: The ranks ended with different results.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_count("world_size", world_size, 1)
    check_count("steps", steps, 1)
    if network.slow_rank is not None and network.slow_rank >= world_size:
        raise ConfigError(f"slow_rank must be below {world_size}, got {network.slow_rank}")
    if stretch is None:
        stretch = automatic_stretch(algorithm, world_size, workload)
    entry = BY_NAME[algorithm]
    world = SimulatedWorld(world_size, network, stretch, pick, entry.control_bytes)
    numel, k = round(workload.numel / stretch), round(workload.k / stretch)
    k = max(k, min(1, workload.k))

    def one_rank(transport: SimulatedTransport) -> list[_Step]:
        collective = entry.collective(transport, numel, k, wire=wire)
        begin_s = workload.compute_s * network.slowness(transport.rank)
        done = []
        for step in range(steps if entry.keeps_state else 1):
            stream = streams.stream(transport.rank, step, numel, k)
            transport.clock = Clock(network, transport.rank, begin_s)
            before = transport.traffic.snapshot()
            reduced = collective.reduce(stream).reduced
            digest = zlib.crc32(reduced.indices.numpy().tobytes())
            digest = zlib.crc32(reduced.values.numpy().tobytes(), digest)
            spent = transport.traffic.since(before)
            done.append(_Step(transport.clock.now_s, spent, reduced.nnz, digest))
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
        last[0].nnz * stretch,
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
    """
    if jobs is None:
        jobs = (os.cpu_count() or 1) if max(world_sizes, default=0) >= LARGE_WORLD else 1
    cases = [(name, world_size) for world_size in world_sizes for name in algorithms]

    def finished(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        for outcome in outcomes:
            progress(f"simulated {outcome.algorithm} on {outcome.world_size} ranks")
            yield outcome

    shared = (workload, network, streams, steps, stretch)
    tasks = [(*case, *shared) for case in cases]
    if check_count("jobs", jobs, 1) == 1:
        return with_efficiency(list(finished(map(_simulate_task, tasks))))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return with_efficiency(list(finished(pool.map(_simulate_task, tasks))))


def _simulate_task(task: tuple[Any, ...]) -> Outcome:
    *arguments, steps, stretch = task
    return simulate(*arguments, steps=steps, stretch=stretch)


def with_efficiency(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with their parallel efficiency: the smallest world's time over theirs."""
    base_s: dict[str, float] = {}
    for outcome in sorted(outcomes, key=lambda o: o.world_size):
        base_s.setdefault(outcome.algorithm, outcome.step_s)
    return [
        replace(o, efficiency=base_s[o.algorithm] / o.step_s)
        if base_s[o.algorithm] > 0
        else replace(o, efficiency=None)
        for o in outcomes
    ]


@dataclass(frozen=True)
class _Step:
    end_s: float
    spent: Traffic
    nnz: int
    digest: int


def _spread(values: list[float]) -> Spread:
    return Spread(max(values), sum(values) / len(values))
