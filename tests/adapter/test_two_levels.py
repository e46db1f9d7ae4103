"""Two levels among processes: shared memory, and a rank that dies."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.launch import horovodrun
from tests.ranks import Ranks, World, with_ranks
from tests.workers import two_levels


@with_ranks(World(4), World(4, "mpi"))
@pytest.mark.parametrize("grid", [(2, 2), (1, 4)], ids=str)
def test_the_law_holds_among_processes(ranks: Ranks, grid: tuple[int, int]) -> None:
    histories = [done.result for done in ranks.run(two_levels.steps, grid, 4)]
    for name, shape in two_levels.SHAPES.items():
        before = np.zeros(shape, np.float32)
        for step in range(4):
            applied, left = zip(*(history[step][name] for history in histories), strict=True)
            assert all(np.array_equal(each, applied[0]) for each in applied)
            came = sum(two_levels.gradients_of(step, rank)[name].numpy() for rank in range(4))
            assert np.array_equal(before + came, applied[0] + sum(left)), (name, step)
            before = sum(left)


@with_ranks(World(4))
def test_who_waits_for_a_neighbour_that_is_gone_is_told(ranks: Ranks) -> None:
    """All of them wait in shared memory, where no connection breaks."""
    told = [done.result for done in ranks.run(two_levels.left_alone)]
    assert told[3] == ""
    assert all(re.search(r"rank 3: .*gradients of .* of its host", each) for each in told[:3]), told


@pytest.mark.launches
def test_trainings_of_two_hosts_of_two_workers() -> None:
    """Horovod takes two names of this machine for two hosts."""
    done = horovodrun(4, "adapter_two_levels.py", hosts="localhost:2,127.0.0.1:2", timeout=200.0)
    for rank in range(4):
        assert f"rank {rank}: two levels passed" in done.stdout
