"""The clocks of a simulated network, against times worked out by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from hvd_sparse.cost_model import Link, Work
from hvd_sparse.errors import ConfigError, PlanError
from hvd_sparse.lab.simulator.network import Network, VirtualClock
from hvd_sparse.lab.simulator.simulated_transport import SimulatedTransport, SimulatedWorld
from hvd_sparse.transports import Transport
from hvd_sparse.transports.framing import HEADER_BYTES

ALPHA, BETA, GAMMA = 1e-3, 1e-6, 1e-7
NETWORK = Network(Link(ALPHA, BETA))


def payload(nbytes: int) -> tuple[torch.Tensor]:
    return (torch.zeros(nbytes - HEADER_BYTES, dtype=torch.uint8),)


def seconds(world_size: int, fn: object, network: Network = NETWORK) -> list[float]:
    def one_rank(transport: SimulatedTransport) -> float:
        fn(transport)  # type: ignore[operator]
        return transport.clock.now_s

    return SimulatedWorld(world_size, network).run(one_rank)


def test_a_message_alone_takes_alpha_and_its_bytes() -> None:
    def one_way(t: Transport) -> None:
        t.exchange(payload(500), [1, None][t.rank], [None, 0][t.rank], channel="a").wait()

    assert seconds(2, one_way) == pytest.approx([ALPHA + 500 * BETA] * 2)
    quick = Network(Link(ALPHA, BETA, gap_s=ALPHA / 10))
    assert seconds(2, one_way, quick) == pytest.approx(
        [ALPHA / 10 + 500 * BETA, ALPHA + 500 * BETA]
    )


def test_both_directions_at_once_cost_no_more() -> None:
    def swap(t: Transport) -> None:
        t.exchange(payload(500), 1 - t.rank, 1 - t.rank, channel="a").wait()

    assert seconds(2, swap) == pytest.approx([ALPHA + 500 * BETA] * 2)


@pytest.mark.parametrize("gap_s", [None, 0.0, 2e-4])
def test_messages_through_one_card_come_one_after_the_other(gap_s: float | None) -> None:
    network = Network(Link(ALPHA, BETA, gap_s=gap_s))
    gap = ALPHA if gap_s is None else gap_s

    def everybody_to_rank_0(t: Transport) -> None:
        handles = [
            t.exchange(
                payload(1000), 0 if t.rank == s else None, s if t.rank == 0 else None, channel="a"
            )
            for s in range(1, 4)
        ]
        for handle in handles:
            handle.wait()

    times = seconds(4, everybody_to_rank_0, network)
    assert times[0] == pytest.approx(ALPHA - gap + 3 * (gap + 1000 * BETA))
    assert times[1:] == pytest.approx([gap + 1000 * BETA] * 3)

    def rank_0_to_everybody(t: Transport) -> None:
        handles = [
            t.exchange(
                payload(1000), s if t.rank == 0 else None, 0 if t.rank == s else None, channel="a"
            )
            for s in range(1, 4)
        ]
        for handle in handles:
            handle.wait()

    times = seconds(4, rank_0_to_everybody, network)
    each = gap + 1000 * BETA
    assert times[0] == pytest.approx(3 * each)
    assert times[1:] == pytest.approx([ALPHA - gap + i * each for i in (1, 2, 3)])


def test_a_card_takes_messages_as_they_come_not_as_they_are_waited_for() -> None:
    clock, far, near = (
        VirtualClock(NETWORK, 0),
        VirtualClock(NETWORK, 1, start_s=1.0),
        VirtualClock(NETWORK, 2),
    )
    late, early = far.send(1000, 0), near.send(1000, 0)
    clock.receive(late, 1000, 1)
    assert clock.now_s == pytest.approx(1.0 + ALPHA + 1000 * BETA)
    clock.receive(early, 1000, 2)  # it came long before, while the card had nothing to do
    assert clock.now_s == pytest.approx(1.0 + ALPHA + 1000 * BETA)


def test_spans_of_a_card_never_overlap() -> None:
    choose = random.Random(1)
    clock = VirtualClock(Network(Link(0.0, 0.0)), 0)
    spans: list[tuple[float, float]] = []
    for _ in range(300):
        earliest, length = choose.uniform(0, 50), choose.uniform(0.01, 0.4)
        end = clock._take_card(earliest, length)
        assert end - length >= earliest - 1e-9
        spans.append((end - length, end))
    spans.sort()
    assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(spans))


def test_reduction_overlaps_with_what_is_under_way() -> None:
    network = Network(Link(0.0, BETA, 10 * BETA))

    def two_messages(t: Transport) -> None:
        peer = 1 - t.rank
        handles = [t.exchange(payload(1000), peer, peer, channel=c) for c in "ab"]
        for handle in handles:
            handle.wait()
            t.worked(Work(merged_entries=125))

    # The second arrives while the first is reduced.
    assert seconds(2, two_messages, network) == pytest.approx([1000 * BETA * (1 + 20)] * 2)


def test_a_slow_rank_delays_those_who_wait_for_it() -> None:
    network = Network(Link(ALPHA, BETA, GAMMA), slow_rank=1, slow_factor=3.0)

    def ring(t: Transport) -> None:
        t.exchange(payload(1000), (t.rank + 1) % 4, (t.rank - 1) % 4, channel="a").wait()
        t.worked(Work(added_values=250))

    usual, slow = ALPHA + 1000 * BETA, 3 * (ALPHA + 1000 * BETA)
    reduction = 1000 * GAMMA
    assert seconds(4, ring, network) == pytest.approx(
        [usual + reduction, slow + 3 * reduction, slow + reduction, usual + reduction]
    )


def test_two_levels() -> None:
    network = Network(Link(ALPHA, BETA), local_size=2, inside=Link(ALPHA / 10, BETA / 10))

    def to_the_next(t: Transport) -> None:
        t.exchange(payload(1000), (t.rank + 1) % 4, (t.rank - 1) % 4, channel="a").wait()

    inside, between = (ALPHA + 1000 * BETA) / 10, ALPHA + 1000 * BETA
    # 0 -> 1 and 2 -> 3 stay in a node; whoever sends or receives abroad takes the longer time.
    assert seconds(4, to_the_next, network) == pytest.approx([between] * 4)

    def within(t: Transport) -> None:
        t.exchange(payload(1000), t.rank ^ 1, t.rank ^ 1, channel="a").wait()

    assert seconds(4, within, network) == pytest.approx([inside] * 4)


def test_ranks_that_wait_for_each_other_are_told() -> None:
    def wrong(t: Transport) -> None:
        t.exchange(None, None, (t.rank + 1) % 3, channel="never").wait()

    with pytest.raises(PlanError, match=r"3 ranks wait .* rank 0 for channel 'never' from rank 1"):
        SimulatedWorld(3, NETWORK).run(wrong)


def test_ranks_at_different_calls_are_told() -> None:
    def wrong(t: Transport) -> None:
        t.exchange(payload(100), 1 - t.rank, 1 - t.rank, channel="ab"[t.rank]).wait()

    with pytest.raises(PlanError, match="different calls"):
        SimulatedWorld(2, NETWORK).run(wrong)


def test_the_first_failure_reaches_the_caller() -> None:
    def fails(t: Transport) -> None:
        if t.rank == 2:
            raise RuntimeError("rank 2 broke")
        t.exchange(None, None, 2, channel="a").wait()

    with pytest.raises(RuntimeError, match="rank 2 broke"):
        SimulatedWorld(5, NETWORK).run(fails)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slow_factor": 0.5}, "slow_factor"),
        ({"slow_rank": -1}, "slow_rank"),
        ({"local_size": 0}, "local_size"),
    ],
)
def test_bad_networks_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Network(Link(ALPHA, BETA), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stretch"):
        SimulatedWorld(2, NETWORK, stretch=0.5)
