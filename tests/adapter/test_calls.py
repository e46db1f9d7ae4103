"""What a small tensor costs the training thread: counted in calls, which no load changes."""

from __future__ import annotations

from tests.ranks import Ranks, World, with_ranks
from tests.workers.adapter_calls import calls_of_a_step

TENSORS = 60
MOST_CALLS_PER_TENSOR = 20


@with_ranks(World(2))
def test_a_tensor_costs_few_calls(ranks: Ranks) -> None:
    for rank in ranks.run(calls_of_a_step, TENSORS):
        per_tensor = {n: count for n, count in rank.result.items() if count >= TENSORS}
        assert "Door.hand_in" in per_tensor
        assert max(per_tensor.values()) < 1.2 * TENSORS, per_tensor  # once, and some per bucket
        assert len(per_tensor) <= MOST_CALLS_PER_TENSOR, " ".join(sorted(per_tensor))
