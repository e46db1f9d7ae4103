"""`OnDevice` itself, with the CPU as the other device."""

from __future__ import annotations

import torch

from hvd_sparse.ops import Accumulation, Momentum
from tests.ops.cases import generator, same_as_reference
from tests.ops.on_device import OnDevice


def test_results_and_changes_come_back() -> None:
    there = OnDevice(torch.device("cpu"))
    residual, gradient, buffer = torch.randn(3, 100, generator=generator())
    for nesterov in (False, True):
        same_as_reference(
            there,
            "accumulate_topk",
            residual[3:60],
            [gradient[:20], gradient[50:87]],
            5,
            buffer=buffer[:57],
            nesterov=nesterov,
        )
    momentum = Momentum(torch.ones(4), 0.5)
    there.accumulate_select(Accumulation(torch.zeros(4), [torch.ones(4)], momentum), 9.0)
    assert momentum.buffer.tolist() == [1.5] * 4
    x = torch.ones(4)
    there.take_at(x, torch.tensor([2], dtype=torch.int32))
    assert x.tolist() == [1.0, 1.0, 0.0, 1.0]
