"""Simulates one algorithm on one world: what each rank sends and receives, and how long it takes.

Flat or in two levels, the real collectives run: over all ranks, or over one rank of each host. In
two levels the dense sum inside a host is not computed, because nothing reads it. Its messages and
additions take their time, and the stream that a rank selects from its shard is drawn at random, as
in the flat form.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from multiprocessing import get_context
from typing import Any

from torch import Tensor

from hvd_sparse.checks import check_choice, check_count, check_not_negative
from hvd_sparse.collectives.registry import BY_NAME, STREAMED, Algorithm, cost, names_of
from hvd_sparse.collectives.two_levels import applied_entries, encoding
from hvd_sparse.cost_model import WORD_BYTES, Work
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.simulator.network import Network, VirtualClock
from hvd_sparse.lab.simulator.simulated_transport import SimulatedTransport, SimulatedWorld
from hvd_sparse.lab.simulator.synthetic_streams import SyntheticStreams
from hvd_sparse.streams import Part, SparseStream
from hvd_sparse.topology import batches
from hvd_sparse.transports import Traffic
from hvd_sparse.wire import PLAIN, Packer, Wire

ALGORITHMS = names_of(lambda entry: entry.name in STREAMED, aliases=True)
"""What can be simulated, with aliases."""

LARGE_WORLD = 64
"""With this many ranks or more, a simulation takes longer than starting a process for it."""

WORLD_WORDS = 1 << 27
"""Most words that all ranks of a simulation receive in a step: a few GiB of memory."""


@dataclass(frozen=True)
class Workload:
    """What every rank brings to a step.

    Attributes:
        numel: n.
        k: Entries of a rank's stream, in `[0, numel]`.
        compute_s: Seconds that a rank computes before the exchange.
        encodes: Whether selecting the entries takes time (`encoding`).
    """

    numel: int
    k: int
    compute_s: float = 0.0
    encodes: bool = False

    def __post_init__(self) -> None:
        check_count("numel", self.numel, 1)
        check_not_negative("compute_s", self.compute_s)
        if not 0 <= self.k <= self.numel:
            raise ConfigError(f"k must be in [0, numel = {self.numel}], got {self.k!r}")


@dataclass(frozen=True)
class Spread:
    """A figure's largest value and mean over the ranks."""

    worst: float
    mean: float


@dataclass(frozen=True)
class SimulatedOutcome:
    """One algorithm on one world. Words, messages and seconds are per step.

    Attributes:
        algorithm: Its name.
        world_size: P.
        stretch: How many elements of the workload an element of the simulation stood for.
        sent_words: Words of four bytes that a rank sends, headers included.
        received_words: Words that a rank receives.
        messages: Messages that a rank sends.
        step_s: Seconds until the last rank is done, computing included.
        exchange_s: The same without computing.
        result_nnz: Entries of the sum.
        card_words: Words that a host's card receives, headers included.
        is_hierarchical: Whether the algorithm ran between hosts, on shards.
        efficiency: Parallel efficiency in weak scaling, against the smallest simulated world of
            the same algorithm. None before `with_efficiency`, and where that world takes no time.
    """

    algorithm: str
    world_size: int
    stretch: float
    sent_words: Spread
    received_words: Spread
    messages: Spread
    step_s: float
    exchange_s: float
    result_nnz: float
    card_words: Spread
    is_hierarchical: bool = False
    efficiency: float | None = None

    @property
    def label(self) -> str:
        """The algorithm and its form, in words."""
        return f"{self.algorithm}, two levels" if self.is_hierarchical else self.algorithm


def simulate(
    algorithm: str,
    world_size: int,
    workload: Workload,
    network: Network,
    streams: SyntheticStreams,
    *,
    steps: int = 2,
    stretch: float | None = None,
    wire: Wire = PLAIN,
    hierarchical: bool = False,
) -> SimulatedOutcome:
    """Run some steps of an algorithm, and measure the last one.

    All ranks begin every step at the same time.

    Args:
        algorithm: One of `ALGORITHMS`.
        world_size: P, at least 1.
        workload: The sizes, and the work, of what every rank brings.
        network: Connects the ranks.
        streams: The entries that every rank brings.
        steps: At least 1; with 2, Ok-Topk is measured between exact thresholds. An algorithm
            without state does the same in every step, and runs once.
        stretch: Simulate vectors that are shorter by this factor, and count each of their bytes as
            that many (see `SimulatedTransport`). None: the smallest that fits into memory.
        wire: The form of the messages.
        hierarchical: In two levels: dense sums inside the hosts, the algorithm between hosts on one
            shard per local rank, and a gather inside the hosts.

    Raises:
        ConfigError: An argument is out of its range.
        AssertionError: The ranks ended with different results.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_count("world_size", world_size, 1)
    check_count("steps", steps, 1)
    if network.slow_rank is not None and network.slow_rank >= world_size:
        raise ConfigError(f"slow_rank must be below {world_size}, got {network.slow_rank}")
    if hierarchical and world_size % network.local_size:
        raise ConfigError(
            f"two levels need whole hosts: world_size must be a multiple of {network.local_size}, "
            f"got {world_size}"
        )
    shards = network.local_size if hierarchical else 1
    if stretch is None:
        stretch = automatic_stretch(algorithm, world_size, workload, shards)
    if stretch > workload.numel:
        raise ConfigError(f"stretch must be at most {workload.numel} elements, got {stretch:g}")
    entry = BY_NAME[algorithm]
    world = SimulatedWorld(world_size, network, stretch, entry.control_bytes)
    numel, k = round(workload.numel / stretch), round(workload.k / stretch)
    k = max(k, min(1, workload.k))

    def one_rank(transport: SimulatedTransport) -> _Step:
        rank = SimulatedRank(transport, entry, numel, k, wire, streams, shards)
        begin_s = workload.compute_s * network.slowness(transport.rank)
        for step in range(steps if entry.keeps_state else 1):
            transport.clock = VirtualClock(network, transport.rank, begin_s)
            before, abroad = transport.traffic.snapshot(), transport.abroad.snapshot()
            nnz, digest = rank.take_step(step, encodes=workload.encodes)
            spent = transport.traffic.since(before), transport.abroad.since(abroad)
        return _Step(transport.clock.now_s, *spent, nnz, digest)

    last = world.run(one_rank)
    if len({step.digest for step in last}) > 1:
        raise AssertionError(f"{algorithm} on {world_size} ranks: they have different results")
    slowest_s = max(network.slowness(rank) for rank in range(world_size)) * workload.compute_s
    step_s = max(step.end_s for step in last)
    words, local = [step.abroad.bytes_received / 4 for step in last], network.local_size
    return SimulatedOutcome(
        algorithm,
        world_size,
        stretch,
        _spread([step.spent.bytes_sent / 4 for step in last]),
        _spread([step.spent.bytes_received / 4 for step in last]),
        _spread([step.spent.messages_sent for step in last]),
        step_s,
        step_s - slowest_s,
        sum(step.nnz for step in last[:shards]) * stretch,
        _spread([sum(words[i : i + local]) for i in range(0, len(words), local)]),
        hierarchical,
    )


def simulate_all(
    algorithms: Sequence[str],
    world_sizes: Sequence[int],
    workload: Workload,
    network: Network,
    streams: SyntheticStreams,
    *,
    steps: int = 2,
    stretch: float | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
    hierarchical: Sequence[bool] = (False,),
) -> list[SimulatedOutcome]:
    """Simulate every algorithm on every world; the results have their parallel efficiency.

    The arguments are as for `simulate`; `hierarchical` is False for the flat form, True for two
    levels, or both. So many `jobs` run at a time, each in a process. None: one per core where a
    world is large, else one, in this process. It does not change the results. `progress` is called
    with a line after each simulation.
    """
    if jobs is None:
        jobs = (os.cpu_count() or 1) if max(world_sizes, default=0) >= LARGE_WORLD else 1
    cases = [
        (name, world_size, levels)
        for world_size in world_sizes
        for name in algorithms
        for levels in hierarchical
    ]

    def finished(outcomes: Iterable[SimulatedOutcome]) -> Iterator[SimulatedOutcome]:
        for count, outcome in enumerate(outcomes, 1):
            told = f"simulated {outcome.label} on {outcome.world_size} ranks"
            progress(f"{count} of {len(cases)}: {told}")
            yield outcome

    shared = (workload, network, streams, steps, stretch)
    tasks = [(name, world_size, *shared, levels) for name, world_size, levels in cases]
    if check_count("jobs", jobs, 1) == 1:
        return with_efficiency(list(finished(map(_simulate_task, tasks))))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return with_efficiency(list(finished(pool.map(_simulate_task, tasks))))


def _simulate_task(task: tuple[Any, ...]) -> SimulatedOutcome:
    *arguments, steps, stretch, levels = task
    return simulate(*arguments, steps=steps, stretch=stretch, hierarchical=levels)


def with_efficiency(outcomes: Sequence[SimulatedOutcome]) -> list[SimulatedOutcome]:
    """Add the parallel efficiency: the smallest world's time over the outcome's own time."""
    base_s: dict[str, float] = {}
    for o in sorted(outcomes, key=lambda o: o.world_size):
        base_s.setdefault(o.label, o.step_s)
    return [
        replace(o, efficiency=base_s[o.label] / o.step_s if base_s[o.label] > 0 else None)
        for o in outcomes
    ]


def automatic_stretch(
    algorithm: str, world_size: int, workload: Workload, shards: int = 1
) -> float:
    """The smallest stretch with which everything that the ranks receive fits into memory.

    `shards` is L in two levels, where the gather inside a host counts, too; else 1.
    """
    ranks, numel, k = world_size // shards, workload.numel // shards, workload.k // shards
    words = cost(algorithm, ranks, numel, k).expected.words
    words += 2 * (shards - 1) * min(numel / 2, applied_entries(algorithm, ranks, numel, k))
    fitting = ceil(words * world_size / WORLD_WORDS)
    return float(max(1, min(fitting, workload.numel)))


class SimulatedRank:
    """What one rank does in a step: it exchanges the share of it that it has in its host.

    `k` of `numel` are entries of the whole vector, and `shards` ranks of a host share it: in two
    levels; else 1.
    """

    def __init__(
        self,
        transport: SimulatedTransport,
        entry: Algorithm,
        numel: int,
        k: int,
        wire: Wire,
        streams: SyntheticStreams,
        shards: int,
    ) -> None:
        self.transport, self.streams = transport, streams
        self.numel, self.k = -(-numel // shards), -(-k // shards)
        across = transport
        if shards > 1:
            host, local = divmod(transport.rank, shards)
            self.inside = transport.group(range(host * shards, (host + 1) * shards), "inside")
            across = transport.group(range(local, transport.world_size, shards), "across")
        self.shards = shards
        self.collective = entry.collective(across, self.numel, self.k, wire=wire)

    def take_step(self, step: int, *, encodes: bool) -> tuple[int, int]:
        """Take a step; returns the entries of this rank's share of the sum, and its checksum.

        If it `encodes`, selecting the entries takes time. The checksum is of the whole sum.
        """
        rank, ranks = self.transport.rank, self.transport.world_size
        if self.shards > 1:
            self._sum_inside()
        self.transport.worked(encoding(self.numel * encodes))
        stream = self.streams.stream(rank, step, self.numel, self.k, ranks)
        reduced = self.collective.reduce(stream).reduced
        if self.shards == 1:
            return reduced.nnz, _checksum([reduced.indices, reduced.values])
        packer = Packer(PLAIN, rank, step)
        part = Part.of(SparseStream(reduced.indices, reduced.values, self.numel))
        payload, _ = packer.pack(packer.settled(part))
        every = self.inside.all_to_all([payload] * self.shards, channel="host.streams")
        return reduced.nnz, _checksum(every)

    def _sum_inside(self) -> None:
        """A reduce-scatter: each rank receives its shard from the others, and adds it up."""
        rank, L, nbytes = self.inside.rank, self.shards, WORD_BYTES * self.numel
        for distances in batches(L):
            handles = [
                self.inside.pretend(nbytes, (rank + s) % L, (rank - s) % L, channel="host.sums")
                for s in distances
            ]
            for handle in handles:
                handle.wait()
                self.inside.worked(Work(added_values=self.numel))


def _checksum(tensors: Iterable[Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.numpy().tobytes(), digest)
    return digest


@dataclass(frozen=True)
class _Step:
    end_s: float
    spent: Traffic
    abroad: Traffic
    nnz: int
    digest: int


def _spread(values: list[float]) -> Spread:
    return Spread(max(values), sum(values) / len(values))
