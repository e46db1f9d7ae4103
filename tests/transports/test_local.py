"""The conformance suite over threads, and what is particular to them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_sparse.errors import PeerLostError, PlanError, TransportError, TransportTimeout
from hvd_sparse.transports import LocalTransport, LocalWorld, run_ranks
from tests.transports.scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_conformance(scenario: Scenario, world_size: int) -> None:
    run_ranks(world_size, scenario, timeout_s=30.0)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_any_sizes_arrive(data: st.DataObject, world_size: int) -> None:
    sizes = st.integers(0, 20) | st.integers(4_000, 9_000)
    rounds = data.draw(st.lists(st.lists(sizes, min_size=36, max_size=36), max_size=4))

    def block(src: int, dst: int, size: int) -> torch.Tensor:
        return (torch.arange(size) * (src + 3) + 17 * dst).to(torch.uint8)

    def rank(t: LocalTransport) -> None:
        for table in rounds:
            P, r = t.world_size, t.rank
            payloads = [(block(r, dst, table[6 * r + dst]),) for dst in range(P)]
            for src, part in enumerate(t.all_to_all(payloads, channel="a")):
                assert torch.equal(part, block(src, r, table[6 * src + r]))
            for src, part in enumerate(t.allgather((block(r, 0, table[r]),), channel="a")):
                assert torch.equal(part, block(src, 0, table[src]))

    run_ranks(world_size, rank, timeout_s=10.0)


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(5, lambda t: t.rank * 10) == [0, 10, 20, 30, 40]


def test_a_world_of_many_ranks() -> None:
    totals = run_ranks(
        200, lambda t: int(t.allreduce_sum(torch.tensor([t.rank]), channel="s").item())
    )
    assert set(totals) == {199 * 100}


def test_the_first_real_error_wins() -> None:
    def rank(t: LocalTransport) -> None:
        if t.rank == 2:
            time.sleep(0.1)
            raise KeyError("rank 2's own")
        t.allgather((torch.zeros(3),), channel="c")

    start = time.monotonic()
    with pytest.raises(KeyError, match="rank 2's own"):
        run_ranks(4, rank, timeout_s=30.0)
    assert time.monotonic() - start < 5.0


def test_a_silent_rank_times_out() -> None:
    release = threading.Event()

    def rank(t: LocalTransport) -> None:
        if t.rank == 3:
            release.wait(10.0)
            return
        if t.rank > 0:
            time.sleep(0.5)  # lest one of these gives rank 0 up before that gives up rank 3
        try:
            t.exchange(None, None, 3 if t.rank == 0 else 0, channel="c").wait()
        finally:
            release.set()

    start = time.monotonic()
    with pytest.raises(TransportTimeout, match="rank 3"):
        run_ranks(4, rank, timeout_s=1.0)
    assert time.monotonic() - start < 5.0


def test_a_run_ends_at_its_limit() -> None:
    release = threading.Event()
    with pytest.raises(TransportTimeout, match=r"\[1\]"):
        run_ranks(3, lambda t: t.rank == 1 and release.wait(20.0), limit_s=0.3)
    release.set()


def test_abort_ends_the_peers_waits() -> None:
    world = LocalWorld(2, timeout_s=20.0)
    mine, peers = world.transports()
    threading.Timer(0.1, peers.abort).start()
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 aborted"):
        mine.exchange(None, None, 1, channel="c").wait()
    with pytest.raises(PeerLostError, match="of no more use"):
        mine.exchange(None, None, 1, channel="c")
    with pytest.raises(PeerLostError):
        peers.exchange(None, None, 0, channel="c")
    assert time.monotonic() - start < 5.0


def test_a_closed_transport_says_so() -> None:
    transport = LocalWorld(1).transport(0)
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="closed"):
        transport.exchange(None, None, None, channel="c")


def test_ranks_that_make_different_calls_are_noticed() -> None:
    def rank(t: LocalTransport) -> None:
        t.allgather((torch.zeros(1),), channel=f"bucket {t.rank}")

    with pytest.raises(PlanError, match="different calls"):
        run_ranks(2, rank, timeout_s=5.0)


def test_sums_of_different_lengths_are_noticed() -> None:
    with pytest.raises(PlanError, match="bytes"):
        run_ranks(2, lambda t: t.allreduce_sum(torch.zeros(t.rank + 1), channel="s"), timeout_s=5.0)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_has_a_rank(world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size"):
        LocalWorld(world_size)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_is_positive(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        LocalWorld(1, timeout_s).transport(0)
