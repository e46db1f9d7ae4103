"""The cost of two levels against the flat form, by figures worked out by hand."""

from __future__ import annotations

import pytest

from hvd_sparse.collectives.registry import BY_NAME, LOSSLESS_CANDIDATES, cost
from hvd_sparse.collectives.two_levels import (
    FARTHEST_FIRST,
    GATHERING,
    NEAREST_FIRST,
    TREES,
    Levels,
    encoding,
    flat,
    shared,
    through_memory,
    two_levels,
)
from hvd_sparse.cost_model import Link, Pace, WireBytes, expected_nnz
from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.offline_plan import dense_ring

CARD = Link(1e-4, 1e-9)
QUICK = Link(1e-6, 1e-12)
N, K = 1_000_000, 10_000


def levels_of(count: int, local_size: int, card: Link = CARD, inside: Link = QUICK) -> Levels:
    return Levels(count, local_size, shared(card, local_size), inside)


def test_bytes_of_a_card_on_two_by_two() -> None:
    levels = levels_of(2, 2)
    # Each of 2 ranks gets 2 foreign streams of k; or 1 stream of k/2.
    assert flat("topk_allgather", levels, N, K).card_bytes == pytest.approx(2 * 2 * 8 * K)
    assert two_levels("topk_allgather", levels, N, K).card_bytes == 2 * 8 * K / 2
    # Halving leaves the host in one round of n/2, there and back; then the shard of n/2 does so.
    assert flat("dense", levels, N, K).card_bytes == 2 * 4 * N
    assert two_levels("dense", levels, N, K).card_bytes == 2 * 4 * N / 2
    # Doubling goes abroad in its second round, with the sum of two streams.
    union = expected_nnz(N, K, 2)
    assert flat("ssar_recursive_double", levels, N, K).card_bytes == pytest.approx(2 * 8 * union)


def test_bruck_reaches_other_hosts_by_its_distance() -> None:
    """P = 8, L = 4: at distance 1 one of four ranks goes abroad, at 2 two of them, at 4 all."""
    foreign_blocks = 1 * 1 / 4 + 2 * 2 / 4 + 4
    predicted = flat("topk_allgather", levels_of(2, 4), N, K)
    assert predicted.card_bytes == pytest.approx(4 * 8 * K * foreign_blocks)


def test_seconds_by_hand() -> None:
    levels = levels_of(2, 4, Link(1e-4, 1e-9), Link(1e-6, 1e-12, gap_s=5e-7))
    predicted = two_levels("topk_allgather", levels, N, K)
    entries = expected_nnz(N // 4, K // 4, 2)
    # Three messages there and three back; those in flight take the gap.
    inside = 2 * (1e-6 + 2 * 5e-7) + (3 * 4 * N / 4 + 3 * 8 * entries) * 1e-12
    assert predicted.inside_s == pytest.approx(inside)
    assert predicted.seconds == pytest.approx(inside + 1e-4 + 8 * K / 4 * 4e-9)


def test_a_dense_ring_enters_each_host_once() -> None:
    nbytes = 2 * 4 * N * 7 / 8
    predicted = dense_ring(levels_of(2, 4, Link(1e-4, 1e-9, 1e-10)), N)
    assert predicted.card_bytes == nbytes
    assert predicted.seconds == pytest.approx(14e-4 + nbytes * 1e-9 + nbytes / 2 * 1e-10)
    alone = dense_ring(levels_of(1, 8), N)
    assert alone.card_bytes == 0
    assert alone.seconds == alone.inside_s == pytest.approx(14e-6 + nbytes * 1e-12)


def test_work_of_both_forms() -> None:
    """Two levels add L - 1 shards, and select in one of them."""
    computing = Link(0.0, 0.0, pace=Pace(added_values=1e-9, scanned_values=1e-10))
    levels = levels_of(2, 4, computing, Link(0.0, 0.0))
    assert encoding(N).added_values == encoding(N).scanned_values == N
    assert flat("topk_allgather", levels, N, K).seconds == pytest.approx(1.1e-9 * N)
    expected = 1e-9 * N * 3 / 4 + 1.1e-9 * N / 4
    assert two_levels("topk_allgather", levels, N, K).seconds == pytest.approx(expected)


@pytest.mark.parametrize("algorithm", BY_NAME)
def test_one_level_is_the_flat_cost(algorithm: str) -> None:
    expected = cost(algorithm, 8, N, K).expected
    for levels in (levels_of(8, 1), levels_of(1, 8)):
        predicted = flat(algorithm, levels, N, K)
        link = CARD if levels.local_size == 1 else QUICK
        assert predicted.seconds == pytest.approx(expected.seconds(link))
        assert predicted.card_bytes == (expected.nbytes() if levels.local_size == 1 else 0)
    alone = two_levels(algorithm, levels_of(8, 1), N, K)
    assert alone == flat(algorithm, levels_of(8, 1), N, K)
    assert two_levels(algorithm, levels_of(1, 8), N, K).card_bytes == 0


@pytest.mark.parametrize("algorithm", BY_NAME)
@pytest.mark.parametrize(("count", "local_size"), [(2, 2), (3, 2), (2, 3), (4, 8), (32, 8)])
def test_fewer_bytes_leave_a_host(algorithm: str, count: int, local_size: int) -> None:
    for wire in (WireBytes(), WireBytes(1.25, 2, 2)):
        levels = levels_of(count, local_size)
        one, other = (form(algorithm, levels, N, K, wire) for form in (flat, two_levels))
        assert 0 < other.card_bytes <= (0.7 if algorithm in TREES else 0.55) * one.card_bytes
        assert 0 < other.inside_s < other.seconds


def test_it_pays_where_the_card_is_slower_than_the_inside() -> None:
    def pays(levels: Levels, names: tuple[str, ...] = LOSSLESS_CANDIDATES) -> bool:
        one, two = (min(f(n, levels, N, K).seconds for n in names) for f in (flat, two_levels))
        return two < one

    slow, quick = Link(1e-4, 8e-9, 1e-10), Link(1e-6, 1e-12, 1e-10)
    assert pays(levels_of(4, 4, slow))
    assert pays(levels_of(32, 8, slow), ("oktopk",))
    assert not pays(levels_of(4, 4, quick, Link(1e-4, 1e-8)))


def test_memory_is_a_link_where_nothing_is_measured() -> None:
    assert through_memory(Link(1e-4, 8e-9, pace=Pace(added_values=4e-10))) == Link(1e-5, 1e-10)
    assert through_memory(Link(1e-6, 8e-9, 2e-10)) == Link(1e-6, 2e-10)


def test_all_named_algorithms_are_known() -> None:
    named = [*FARTHEST_FIRST, *NEAREST_FIRST, *GATHERING]
    assert set(named) <= set(BY_NAME)
    assert len(set(named)) == len(named)


def test_bad_hosts_are_named() -> None:
    with pytest.raises(ConfigError, match="local_size must be a whole number of at least 1, got 0"):
        Levels(2, 0, CARD, QUICK)
    with pytest.raises(ConfigError, match="hosts"):
        Levels(0, 2, CARD, QUICK)
