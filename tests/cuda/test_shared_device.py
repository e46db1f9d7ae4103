"""Ranks whose gradients are on one device train alike."""

from __future__ import annotations

import pytest

from tests.cuda.test_devices import DEVICES
from tests.ranks import Ranks, World, with_ranks
from tests.workers.training_on import train_on


@with_ranks(World(2))
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_share_a_device(device: str, ranks: Ranks) -> None:
    ranks.run(train_on, device, timeout=240)
