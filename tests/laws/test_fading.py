"""A low-pass filter and decay change the law by what they say, to the last entry, and count it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks
from tests.laws.buckets import bucket_by, step_of
from tests.streams import dense

NUMEL = 600
FADINGS: dict[str, dict[str, Any]] = {
    "low pass": {"low_pass": 0.25},
    "decay": {"residual_decay": 0.75},
    "both": {"low_pass": 0.5, "residual_decay": 0.5},
}
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "local": {"momentum": 0.5, "momentum_kind": "local"},
    "global": {"momentum": 0.5, "momentum_kind": "global"},
}


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("wire", ["float32", "float16+gap"])
@pytest.mark.parametrize("memory_name", MEMORIES)
@pytest.mark.parametrize("fading", FADINGS)
@pytest.mark.parametrize("name", ["clt_k", "exdyna", "oktopk", "dgc", "topk"])
def test_the_law_says_what_was_let_go(name: str, fading: str, memory_name: str, wire: str) -> None:
    arguments = {"density": 0.05, "wire": wire, **FADINGS[fading], **MEMORIES[memory_name]}
    method = METHODS[name](**arguments).make()

    def worker(transport: Transport) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        bucket = bucket_by(method, transport, NUMEL)
        memory = bucket.memory
        seen = []
        for step in range(10):
            before = memory.residual.double()
            momentum = memory.tensors().get("momentum", torch.zeros(NUMEL)).double()
            g = gradient(transport.rank, step)
            _, reduction = step_of(bucket, [g])
            given = g.double()
            if memory_name != "plain":
                given += 0.5 * momentum  # which enters as the gradient does
            seen.append((before, given, dense(reduction.reduced), memory.residual.double()))
        assert memory.let_go_l1 > 0
        return seen

    low_pass = method.memory.low_pass
    for outcomes in zip(*run_ranks(3, worker, timeout_s=60.0), strict=True):
        before, given, after = (sum(o[i] for o in outcomes) for i in (0, 1, 3))
        kept = before + low_pass * (given - outcomes[0][2])
        torch.testing.assert_close(after, method.memory.residual_decay * kept, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fading", FADINGS)
def test_a_skipped_step_lets_nothing_go(fading: str) -> None:
    def worker(transport: Transport) -> None:
        method = METHODS["clt_k"](density=0.05, **FADINGS[fading]).make()
        engine = Engine(method)
        engine.connect(transport)
        for step in range(6):
            before = engine.state_dict()["residual"], engine.stats().let_go_l1
            spec = TensorSpec("w", (NUMEL,), "torch.float32")
            engine.submit(spec, gradient(transport.rank, step))
            engine.scale = 1.0
            engine.result("w")
            engine.settle(engine.residuals.changed if step == 3 else ())
            after = engine.state_dict()["residual"], engine.stats().let_go_l1
            if step == 3:
                assert torch.equal(after[0]["w"], before[0]["w"])
                assert after[1] == before[1]
            else:
                assert after[1] > before[1]
        engine.reassign(method)
        assert engine.stats().let_go_l1 == after[1]
        engine.disconnect()

    run_ranks(2, worker, timeout_s=60.0)


def test_one_entry_by_hand() -> None:
    """ScaleCom: m = (1 - β) m + β (m + g - sent)."""
    options: dict[str, Any] = {"collective": "topk_allgather", "density": 0.5, "low_pass": 0.25}
    method = METHODS["topk"](**options).make()

    def worker(transport: Transport) -> tuple[list[float], float]:
        bucket = bucket_by(method, transport, 2)
        memory = bucket.memory
        memory.residual.copy_(torch.tensor([4.0, 8.0]))
        step_of(bucket, [torch.tensor([1.0, 2.0])])
        return memory.residual.tolist(), memory.let_go_l1

    # 5 stays, of which a quarter of the change counts; 10 is sent, and 3/4 of 8 stays.
    assert run_ranks(1, worker, timeout_s=10.0) == [([4.25, 6.0], 0.75 * (1.0 + 8.0))]
