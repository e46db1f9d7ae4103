"""The grid of hosts and workers that ranks fill."""

from __future__ import annotations

import pytest

from hvd_sparse.errors import ConfigError
from hvd_sparse.hosts import Grid, grid_of
from tests.grids import slots


def test_a_grid_knows_who_is_in_the_host_and_who_is_across() -> None:
    every = slots(2, 2, 2)
    grid = grid_of(every, 3)
    assert grid == Grid(((0, 1), (2, 3), (4, 5)), 1, 1)
    assert (grid.hosts, grid.local_size, grid.host, grid.local_rank) == (3, 2, 1, 1)
    assert (grid.inside, grid.across) == ((2, 3), (1, 3, 5))
    # MPI may count through all hosts first.
    scattered = [every[i] for i in (0, 2, 4, 1, 3, 5)]
    assert grid_of(scattered, 1).inside == (1, 4)
    assert grid_of(scattered, 1).across == (0, 1, 2)


def test_what_is_no_grid_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"as many workers .* rank 0 2, rank 1 2, rank 2 1"):
        grid_of(slots(2, 1), 0)
    with pytest.raises(ConfigError, match="whole hosts, got 1 of the 2 workers of host 1"):
        grid_of(slots(2, 2)[:3], 0)
    twice = slots(2, 2)
    twice[3] = twice[2]
    with pytest.raises(ConfigError, match=r"local rank 0 of host 1 .* got ranks 2 and 3"):
        grid_of(twice, 0)
