"""What users do beside a plain training loop, on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import Ranks, World, with_ranks
from tests.workers.adapter_habits import HABITS


@with_ranks(World(2))
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_works_or_is_refused_by_name(ranks: Ranks, habit: Callable[[], None]) -> None:
    ranks.run(habit)
