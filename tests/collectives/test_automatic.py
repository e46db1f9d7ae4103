"""The choice of a collective, and the measurement that it rests on."""

from __future__ import annotations

import pytest

from hvd_sparse.collectives import OkTopk, SsarRecursiveDouble, TopkAllgather
from hvd_sparse.collectives.automatic import automatic_collective, cheapest_algorithm
from hvd_sparse.collectives.link import link_of
from hvd_sparse.collectives.registry import CANDIDATES, COSTED, LOSSLESS_CANDIDATES
from hvd_sparse.cost_model import ORDINARY_LINK, Link
from hvd_sparse.simulator import Network, SyntheticStreams, Workload, run_simulated, simulate
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.wire import WIRES, CompactWire, Wire

DENSE_BY_QSGD = CompactWire("float32", "gap", dense_values="qsgd2")


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_all_ranks_measure_the_same_link_once(world_size: int) -> None:
    def measure(transport: Transport) -> tuple[Link, Link, int]:
        link = link_of(transport)
        messages = transport.traffic.messages_sent
        again = link_of(transport)
        assert transport.traffic.messages_sent == messages
        assert transport.traffic.bytes_sent < 6 << 20
        return link, again, messages

    outcomes = run_ranks(world_size, measure)
    first = outcomes[0][0]
    assert all(link == again == first for link, again, _ in outcomes)
    assert first.alpha_s > 0
    assert first.reduction_s_per_byte > 0


def test_a_given_link_is_not_measured() -> None:
    given = Link(1e-5, 1e-9)

    def measure(transport: Transport) -> Link:
        transport.link = given
        link = link_of(transport)
        assert transport.traffic.messages_sent == 0
        return link

    assert run_ranks(3, measure) == [given] * 3


def test_a_world_of_one_measures_nothing() -> None:
    assert run_ranks(1, link_of) == [ORDINARY_LINK]


@pytest.mark.parametrize(
    ("world_size", "k", "link", "expected"),
    [
        (8, 10, Link(1e-3, 1e-9), SsarRecursiveDouble),
        (8, 50_000, Link(1e-6, 1e-8), OkTopk),
        (3, 10, Link(1e-3, 1e-8), TopkAllgather),
        (2, 50_000, Link(1e-3, 1e-8), TopkAllgather),
    ],
)
def test_the_collective_follows_from_world_k_and_link(
    world_size: int, k: int, link: Link, expected: type
) -> None:
    def choose(transport: Transport) -> type:
        transport.link = link
        wire = WIRES["float16"]
        collective = automatic_collective(transport, 1_000_000, k, wire=wire)
        assert collective.wire is wire
        return type(collective)

    assert run_ranks(world_size, choose) == [expected] * world_size


@pytest.mark.parametrize(
    ("k", "wire", "expected"),
    [
        (100_000, WIRES["float32"], "ssar_split_allgather"),
        (100_000, WIRES["float16+gap"], "ssar_recursive_double"),
        (30_000, WIRES["float32"], "ssar_recursive_double"),
        (30_000, DENSE_BY_QSGD, "ssar_split_allgather"),
    ],
)
def test_the_wire_counts(k: int, wire: Wire, expected: str) -> None:
    def choose(transport: Transport) -> str:
        transport.link = Link(1e-4, 1e-8)
        return cheapest_algorithm(transport, 1_000_000, k, wire=wire)

    assert run_ranks(8, choose) == [expected] * 8


def test_every_candidate_has_a_formula() -> None:
    assert set(CANDIDATES) <= set(COSTED)
    assert "oktopk" not in LOSSLESS_CANDIDATES


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
@pytest.mark.parametrize("density", [0.0005, 0.005, 0.05, 0.3])
@pytest.mark.parametrize(
    "link", [Link(1e-4, 8e-9, 1e-9), Link(1e-5, 1e-9, 1e-9)], ids=["1gbit", "8gbit"]
)
def test_the_pick_is_nearly_the_best_that_is_simulated(
    world_size: int, density: float, link: Link
) -> None:
    numel = 100_000
    workload = Workload(numel, round(density * numel))
    seconds = {
        name: simulate(name, world_size, workload, Network(link), SyntheticStreams()).exchange_s
        for name in CANDIDATES
    }

    def choose(transport: Transport) -> str:
        transport.link = link
        return cheapest_algorithm(transport, numel, workload.k, CANDIDATES)

    picked = run_simulated(world_size, choose, Network(link))[0]
    assert seconds[picked] <= 1.2 * min(seconds.values())
