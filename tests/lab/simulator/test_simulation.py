"""Collectives on simulated ranks: what is counted, and that it depends on nothing else."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from hvd_sparse.collectives.registry import BY_NAME, STREAMED, cost
from hvd_sparse.cost_model import Link
from hvd_sparse.lab.simulator import (
    ALGORITHMS,
    Network,
    SimulatedTransport,
    SimulatedWorld,
    SyntheticStreams,
    Workload,
    simulate,
    simulate_all,
    with_efficiency,
)
from hvd_sparse.lab.simulator.scheduler import Scheduler
from hvd_sparse.topology import DIRECT_ALLGATHER_RANKS, allgather_loads
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.transports.framing import HEADER_BYTES

NETWORK = Network(Link(1e-5, 1e-9, 1e-10))
ONE_REGION = SyntheticStreams(region=0.01, overlap=0.5)


def test_each_algorithm_is_run_once_where_all_are() -> None:
    distinct = [BY_NAME[name] for name in STREAMED]
    assert len(set(distinct)) == len(distinct)
    assert set(distinct) == {BY_NAME[name] for name in ALGORITHMS}
    assert "topk_dsa" in set(ALGORITHMS) - set(STREAMED)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_order_of_threads_makes_no_difference(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, streams = Workload(20_000, 300, 1e-3), SyntheticStreams(overlap=0.3, skew=0.5)
    network = Network(Link(1e-5, 1e-9, 1e-9, gap_s=2e-6), slow_rank=3, slow_factor=2.0)
    outcomes = [simulate(algorithm, 13, workload, network, streams)]
    for seed in range(4):
        monkeypatch.setattr(Scheduler, "pick", staticmethod(random.Random(seed).randrange))
        outcomes.append(simulate(algorithm, 13, workload, network, streams))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("world_size", [3, 5, 8, 11])
def test_allgather_is_that_of_all_transports(world_size: int) -> None:
    def gather(transport: SimulatedTransport, method: Any) -> Any:
        own = torch.arange(13 * transport.rank, dtype=torch.uint8)
        blocks = method(transport, (own,), channel="a")
        return [b.tolist() for b in blocks], transport.clock.now_s, transport.traffic

    for stretch in (1.0, 7.0):
        ours, theirs = (
            SimulatedWorld(world_size, NETWORK, stretch).run(partial(gather, method=method))
            for method in (SimulatedTransport.allgather, Transport.allgather)
        )
        for mine, reference in zip(ours, theirs, strict=True):
            assert mine[0] == reference[0]
            if stretch == 1.0:  # otherwise its tables would be stretched with their blocks
                assert mine[1:] == reference[1:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 11])
def test_loads_of_an_allgather_are_what_its_ranks_send(world_size: int) -> None:
    sizes = [8 * (rank**2 % 7) for rank in range(world_size)]

    def gather(transport: Transport) -> tuple[int, int]:
        own = torch.zeros(sizes[transport.rank], dtype=torch.uint8)
        transport.allgather((own,), channel="a")
        return transport.traffic.bytes_sent, transport.traffic.messages_sent

    loads = allgather_loads(sizes)
    for rank, (sent, messages) in enumerate(SimulatedWorld(world_size, NETWORK).run(gather)):
        tables = 0 if world_size <= DIRECT_ALLGATHER_RANKS else 8 * (world_size - 1)
        assert sent == loads[rank] + tables + HEADER_BYTES * messages


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_bytes_and_results_are_those_of_the_local_transport(
    algorithm: str, world_size: int
) -> None:
    numel, k, streams = 5_000, 200, SyntheticStreams(overlap=0.2)

    def reduce(transport: Transport) -> tuple[list[int], list[float], int, int]:
        stream = streams.stream(transport.rank, 0, numel, k)
        reduced = BY_NAME[algorithm].collective(transport, numel, k).reduce(stream).reduced
        traffic = transport.traffic
        return (
            reduced.indices.tolist(),
            reduced.values.tolist(),
            traffic.bytes_sent,
            traffic.bytes_received,
        )

    assert SimulatedWorld(world_size, NETWORK).run(reduce) == run_ranks(world_size, reduce)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_stretched_simulation_tells_the_same(algorithm: str) -> None:
    workload, streams = Workload(1 << 19, 1 << 13), SyntheticStreams(overlap=0.25)
    full = simulate(algorithm, 8, workload, NETWORK, streams, stretch=1.0)
    short = simulate(algorithm, 8, workload, NETWORK, streams, stretch=8.0)
    assert short.stretch == 8.0
    assert short.exchange_s == pytest.approx(full.exchange_s, rel=0.05)
    assert short.received_words.worst == pytest.approx(full.received_words.worst, rel=0.05)
    assert short.result_nnz == pytest.approx(full.result_nnz, rel=0.05)
    assert short.messages == full.messages


def check_oktopk_volume(world_size: int, k: int, streams: SyntheticStreams) -> None:
    """Never above 6k (P-1)/P words sent or received, never below 2k (P-1)/P received.

    The papers count entries alone. What is no entry is subtracted: the headers, the tables of
    allgather, and the counts by which the ranks find the threshold.
    """
    outcome = simulate("oktopk", world_size, Workload(100 * k, k), NETWORK, streams, stretch=1.0)
    share = (world_size - 1) / world_size
    control = cost("oktopk", world_size, 100 * k, k).expected.plain_words
    control += 2 * outcome.messages.worst + 4 * 2 * world_size  # headers, and two tables of sizes
    tolerance = 0.1 * k  # of the result's nnz
    assert outcome.received_words.mean >= 2 * (k - tolerance) * share
    for words in (outcome.sent_words, outcome.received_words):
        assert words.worst <= 6 * k * share + control
    assert abs(outcome.result_nnz - k) <= tolerance


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16, 31, 48])
@pytest.mark.parametrize("spread", ["even", "crowded", "one region", "one owner"])
def test_oktopk_stays_within_its_volume(world_size: int, spread: str) -> None:
    streams = {
        "even": SyntheticStreams(),
        "crowded": SyntheticStreams(skew=3.0, overlap=0.5),
        "one region": ONE_REGION,
        "one owner": SyntheticStreams(loud=1 / world_size),
    }[spread]
    check_oktopk_volume(world_size, 4_000, streams)


@pytest.mark.slow
def test_oktopk_stays_within_its_volume_on_128_ranks() -> None:
    check_oktopk_volume(128, 4_000, ONE_REGION)


def test_a_slow_rank_and_a_quick_node_show() -> None:
    workload, streams = Workload(100_000, 1_000, 1e-2), SyntheticStreams()
    plain = simulate("oktopk", 8, workload, NETWORK, streams)
    slow = Network(NETWORK.link, slow_rank=5, slow_factor=2.0)
    assert simulate("oktopk", 8, workload, slow, streams).step_s > 2e-2
    nodes = Network(NETWORK.link, local_size=4, inside=Link(1e-7, 1e-11))
    assert simulate("oktopk", 8, workload, nodes, streams).step_s < plain.step_s
    assert plain.exchange_s == pytest.approx(plain.step_s - 1e-2)


def test_efficiency_is_relative_to_the_smallest_world() -> None:
    workload = Workload(100_000, 1_000, 1e-3)
    outcomes = with_efficiency(
        [simulate("topk_allgather", p, workload, NETWORK, SyntheticStreams()) for p in (8, 2, 4)]
    )
    by_size = {o.world_size: o for o in outcomes}
    assert by_size[2].efficiency == 1.0
    assert by_size[8].efficiency == by_size[2].step_s / by_size[8].step_s < 1.0


def test_processes_make_no_difference() -> None:
    workload = Workload(20_000, 200)
    arguments = (["dense", "oktopk"], [2, 3], workload, NETWORK, SyntheticStreams())
    told: list[str] = []
    assert simulate_all(*arguments, jobs=2, progress=told.append) == simulate_all(*arguments)
    assert told[-1] == "4 of 4: simulated oktopk on 3 ranks"
