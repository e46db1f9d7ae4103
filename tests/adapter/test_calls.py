"""What a small tensor costs the training thread: counted in calls, which no load changes."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any
from unittest import mock

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse
from hvd_sparse import Compression
from hvd_sparse.engine.bucket import Bucket
from tests.ranks import Ranks, World, with_ranks

STEPS = 4
WAITING = ("Pauses.pause", "Session.raise_failure", "Engine.error", "Engine._transport")
PACKAGE = hvd_sparse.__path__[0]


def calls_of_a_step(tensors: int) -> dict[str, int]:
    """How often the training thread calls which function of this package in one step.

    Of a step that is planned already. Gradients of a CPU model come on the thread that calls
    `backward`, so that their hooks are counted, too. How often a wait asks again is chance.
    """
    parameters = [nn.Parameter(torch.ones(40)) for _ in range(tensors)]
    named = [(f"calls.{tensors}.{i}", p) for i, p in enumerate(parameters)]
    half = 40 * tensors // 2
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.01),
        named_parameters=named,
        compression=Compression.topk(named, density=0.1, dense_below=0, bucket_numel=half),
    )
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1

    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in parameters)
        with mock.patch.object(Bucket, "missing", autospec=True, side_effect=Bucket.missing) as ask:
            sys.setprofile(count if step == STEPS - 1 else None)
            try:
                loss.backward()  # type: ignore[union-attr]
                optimizer.step()
            finally:
                sys.setprofile(None)
        assert step == 0 or not ask.called  # it looks at every tensor of a bucket
    for waiting in WAITING:
        calls.pop(waiting, None)
    return dict(calls)


TENSORS = 60
MOST_CALLS_PER_TENSOR = 20


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified names")
@with_ranks(World(2))
def test_a_tensor_costs_few_calls(ranks: Ranks) -> None:
    for rank in ranks.run(calls_of_a_step, TENSORS):
        per_tensor = {n: count for n, count in rank.result.items() if count >= TENSORS}
        assert "Door.hand_in" in per_tensor
        assert max(per_tensor.values()) < 1.2 * TENSORS, per_tensor  # once, and some per bucket
        assert len(per_tensor) <= MOST_CALLS_PER_TENSOR, " ".join(sorted(per_tensor))
