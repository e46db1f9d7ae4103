"""Which sizes a sweep measures in the time that it has."""

from __future__ import annotations

from threading import local

import pytest

from hvd_sparse.planner import measure
from hvd_sparse.planner.measure import NUMELS
from hvd_sparse.transports import Transport, run_ranks

PER_ELEMENT_S = 1e-6


def swept(
    monkeypatch: pytest.MonkeyPatch, share_s: float, fixed_s: float = 0.01, ranks: int = 1
) -> list[list[int]]:
    """The sizes that each rank measures, by clocks that only the measured work moves.

    Rank 1 takes twice as long as rank 0, rank 2 three times.
    """
    clock = local()
    monkeypatch.setattr(measure, "perf_counter", lambda: clock.now_s)

    def worker(transport: Transport) -> list[int]:
        clock.now_s = 0.0

        def time_one(numel: int) -> dict[str, float]:
            seconds = (1 + transport.rank) * (fixed_s + PER_ELEMENT_S * numel)
            clock.now_s += seconds
            return {"all": seconds}

        return list(measure._sweep(transport, time_one, NUMELS, share_s))

    return run_ranks(ranks, worker)


@pytest.mark.parametrize(("share_s", "largest"), [(1.5, 2), (5.0, 3), (16.0, 3), (30.0, 4)])
def test_the_largest_size_that_fits_is_measured(
    monkeypatch: pytest.MonkeyPatch, share_s: float, largest: int
) -> None:
    assert swept(monkeypatch, share_s) == [[*NUMELS[:2], NUMELS[largest]]]


@pytest.mark.parametrize("share_s", [0.0, 1.0])
def test_a_line_has_two_points_even_without_time(
    monkeypatch: pytest.MonkeyPatch, share_s: float
) -> None:
    assert swept(monkeypatch, share_s) == [[*NUMELS[:2]]]


def test_sizes_grow_while_the_fixed_part_is_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert swept(monkeypatch, 0.0, fixed_s=1.0) == [[*NUMELS[:4]]]


def test_how_far_is_for_rank_0_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, *others = swept(monkeypatch, 5.0, ranks=3)
    assert len(mine) == 3
    assert others == [mine, mine]


def test_a_model_is_swept_up_to_its_own_size() -> None:
    assert measure._up_to(7_918_750) == [*NUMELS[:4], 7_918_750]
    assert measure._up_to(NUMELS[2]) == [*NUMELS[:3]]
    assert measure._up_to(3) == [*NUMELS[:2]]
    assert measure._up_to(10**9) == [*NUMELS]
