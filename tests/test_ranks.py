"""Ranks that tests share: a scenario that goes wrong says how, and costs the next one nothing."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import horovod.torch as hvd
import pytest

from tests.launch import LaunchError, horovodrun
from tests.ranks import Ranks, ScenarioError, World, with_ranks


def fail_on_rank_1() -> None:
    print(f"rank {hvd.rank()} was here")
    if hvd.rank() == 1:
        raise ValueError("not today")


def hang_on_rank_1() -> None:
    while hvd.rank() == 1:
        time.sleep(0.1)


def die_on_rank_1() -> None:
    if hvd.rank() == 1:
        os._exit(0)


def variable(name: str) -> str | None:
    return os.environ.get(name)


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    ranks = Ranks(World(2))
    yield ranks
    ranks.kill()


@pytest.mark.launches
def test_what_goes_wrong_is_told_and_the_next_scenario_has_new_ranks(own_ranks: Ranks) -> None:
    with pytest.raises(ScenarioError) as failed:
        own_ranks.run(fail_on_rank_1)
    for line in ("--- rank 0\nrank 0 was here", "--- rank 1 failed", "ValueError: not today"):
        assert line in str(failed.value)
    with pytest.raises(ScenarioError, match="rank 1 had not ended after 2 s") as hung:
        own_ranks.run(hang_on_rank_1, timeout=2.0)
    assert "in hang_on_rank_1" in str(hung.value)  # where its thread is
    with pytest.raises(ScenarioError, match="rank 1 had not ended after the death of a rank"):
        own_ranks.run(die_on_rank_1, timeout=30.0)
    assert [done.result for done in own_ranks.run(variable, "NOTHING")] == [None, None]
    own_ranks.close()


@pytest.mark.launches
def test_a_launch_that_hangs_tells_where() -> None:
    with pytest.raises(LaunchError, match=r"did not end in 8 s") as hung:
        horovodrun(2, hang_on_rank_1, timeout=8.0)
    assert re.search(r"\[1\]<stderr>:  File .* in hang_on_rank_1", str(hung.value))


@with_ranks(World(2))
def test_variables_are_set_for_one_scenario(ranks: Ranks) -> None:
    done = ranks.run(variable, "TEST_COLOUR", env={"TEST_COLOUR": "red"})
    assert [rank.result for rank in done] == ["red", "red"]
    assert [rank.result for rank in ranks.run(variable, "TEST_COLOUR")] == [None, None]
