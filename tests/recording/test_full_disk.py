"""A disk that is full ends the recording, and no training."""

from __future__ import annotations

from tests.ranks import Ranks, World, with_ranks
from tests.workers.recorder_full_disk import same_weights_on_a_full_disk


@with_ranks(World(2))
def test_a_full_disk_under_horovodrun(ranks: Ranks) -> None:
    ranks.run(same_weights_on_a_full_disk)
