"""The NCCL transport between processes that have a device each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ranks import DYNAMIC_SETS, Ranks, World, with_ranks
from tests.transports.test_processes import conformance, process_sets


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="one CUDA device; NCCL needs one for each rank"
)
@with_ranks(World(max(1, min(torch.cuda.device_count(), 5)), env=DYNAMIC_SETS))
@pytest.mark.parametrize("scenario", [conformance, process_sets])
def test_processes_with_a_device_each(ranks: Ranks, scenario: Callable[[str], None]) -> None:
    ranks.run(scenario, "nccl", timeout=200.0)
