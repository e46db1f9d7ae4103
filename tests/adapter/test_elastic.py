"""Residuals in `hvd.elastic`'s state: ranks whose commits are apart, and workers that are gone.

Real deaths are in tests/faults/test_elastic.py.
"""

from __future__ import annotations

import pytest

from tests.ranks import Ranks, World, with_ranks
from tests.workers.adapter_commits import (
    come_together,
    fail_after_a_reduction,
    fail_in_a_commit,
    fail_with_an_embedding,
    forget_the_compression,
    go_on_without_a_restore,
    join_late,
    repeat_a_commit,
)

worlds = with_ranks(World(3))


@worlds
@pytest.mark.parametrize("ahead", [[0], [1], [0, 2], [1, 2]], ids=str)
def test_a_model_and_residuals_of_two_commits_never_go_on_together(
    ranks: Ranks, ahead: list[int]
) -> None:
    ranks.run(come_together, ahead)


@worlds
def test_commits_of_two_histories_are_not_taken_for_one(ranks: Ranks) -> None:
    ranks.run(repeat_a_commit)


@worlds
def test_a_change_of_hosts_between_two_commits_costs_nothing(ranks: Ranks) -> None:
    ranks.run(go_on_without_a_restore)


@worlds
def test_what_went_with_a_worker_is_counted_once(ranks: Ranks) -> None:
    ranks.run(join_late)


@worlds
def test_a_state_without_the_compression_is_warned_of(ranks: Ranks) -> None:
    for rank in ranks.run(forget_the_compression, "forgotten"):
        assert [m for m in rank.result if "pass TorchState(..., compression=" in m], rank
    for how in ("remembered", "not elastic"):
        for rank in ranks.run(forget_the_compression, how):
            assert rank.result == []


@worlds
def test_a_step_that_fails_after_its_reduction_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(fail_after_a_reduction)


@worlds
def test_a_step_that_fails_with_an_embedding_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(fail_with_an_embedding)


@worlds
def test_who_fails_in_a_commit_is_named(ranks: Ranks) -> None:
    for rank in ranks.run(fail_in_a_commit):
        assert "the reason of rank 1" in rank.result
