"""Residuals in `hvd.elastic`'s state: ranks whose commits are apart, and workers that are gone.

Real deaths are in tests/faults/test_elastic.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

import hvd_sparse
from tests.ranks import Ranks, World, with_ranks

NUMEL = 3000
LATE_S = 4.0


class Training:
    """A model of one tensor, its state, and the books of this rank."""

    def __init__(self, step: int = 0) -> None:
        self.model = nn.Module()
        self.model.large = nn.Parameter(torch.zeros(NUMEL))
        self.compression = hvd_sparse.Compression.oktopk(
            self.model.named_parameters(), density=0.02, timeout_s=20.0
        )
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
            op=hvd.Sum,
        )
        self.state = hvd.elastic.TorchState(
            self.model, self.optimizer, compression=self.compression, step=step
        )
        self.state.sync()

    def step(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            (self.model.large * gradient(self.state.step, hvd.rank())).sum().backward()
            self.optimizer.step()
            self.state.step += 1

    def residual(self) -> Tensor:
        found: Tensor | None = self.compression.state_dict()["residual"].get("large")
        return torch.zeros(NUMEL) if found is None else found

    def missing(self) -> Tensor:
        """What all ranks have brought, and neither weights nor residuals have."""
        steps = range(self.state.step)
        brought = sum((gradient(step, hvd.rank()) for step in steps), torch.zeros(NUMEL))
        total = hvd.allreduce(brought - self.residual(), op=hvd.Sum, name="commits.books")
        return total + self.model.large.detach()


def gradient(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-9, 10, (NUMEL,), generator=generator).float()


def norm(tensor: Tensor) -> float:
    return float(tensor.double().abs().sum())


def come_together(ahead: list[int]) -> None:
    """Some ranks commit step 10, the others only step 5; then all restore and synchronise."""
    training = Training()
    training.step(5)
    training.state.commit()
    at_5 = training.residual()
    training.step(5)
    at_10 = training.residual()
    if hvd.rank() in ahead:
        training.state.save()  # a commit at which it is alone
    training.step(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.state.restore()
        assert training.state.step == (10 if hvd.rank() in ahead else 5)
        training.state.sync()
    told = [str(w.message) for w in caught if "hvd_sparse" in str(w.message)]
    dropped = training.compression.stats().dropped_l1
    lost = torch.zeros(NUMEL)
    if 0 not in ahead:
        assert training.state.step == 5
        assert torch.equal(training.residual(), at_5)
    else:
        assert training.state.step == 10
        behind = hvd.rank() not in ahead
        assert torch.equal(training.residual(), torch.zeros(NUMEL) if behind else at_10)
        assert not behind or dropped == norm(at_5) > 0
        assert not behind or "dropped the residuals of commit 1 (step 5): rank 0 goes on" in told[0]
        lost = hvd.allreduce(at_10 if behind else lost, op=hvd.Sum, name="commits.lost")
        assert lost.any()
    if 0 not in ahead or hvd.rank() in ahead:
        assert (dropped, told) == (0.0, [])
    training.step(3)
    assert torch.equal(training.missing(), lost)

    training.state.restore()  # a second fault before the next commit: all is as before the first
    assert training.compression.stats().dropped_l1 == 0.0
    training.state.sync()
    assert training.compression.stats().dropped_l1 == dropped
    training.step(2)
    training.state.commit()
    training.step(2)
    training.state.restore()
    training.state.sync()
    assert training.state.step == (5 if 0 not in ahead else 10) + 2
    assert torch.equal(training.missing(), lost)
    assert training.compression.stats().dropped_l1 == dropped
    training.compression.close()


def fail_after_a_reduction() -> None:
    """Of which `sync` makes no step: Horovod's optimizer takes one there, to make room."""
    training = Training()
    training.step(2)
    training.state.save()
    (training.model.large * gradient(training.state.step, hvd.rank())).sum().backward()
    training.optimizer.synchronize()
    training.state.restore()
    training.state.sync()
    training.step(2)
    assert training.state.step == 4
    assert not training.missing().any()
    training.compression.close()


def fail_while_others_are_late() -> float:
    """What is under way is not waited for: in a world that has ended, nobody may come to it."""
    training = Training()
    training.step(2)
    training.state.save()
    at_2 = training.residual()
    if hvd.rank() == 0:
        (training.model.large * gradient(training.state.step, hvd.rank())).sum().backward()
    else:
        time.sleep(LATE_S)
        door = training.compression._door  # Horovod, which lives on here, is to end rank 0's pulse
        hvd.allreduce(torch.zeros(3, dtype=torch.float64), name=door._pulse_name, op=hvd.Sum)
    try:
        raise HorovodInternalError("a peer is gone")
    except HorovodInternalError:
        begin_s = time.monotonic()
        training.state.restore()
        took_s = time.monotonic() - begin_s
    assert torch.equal(training.residual(), at_2)
    training.compression.close()
    hvd.barrier()
    return took_s


def fail_with_an_embedding() -> None:
    """Its gradient, of the step that failed, is applied by nobody."""
    weights = []
    for fails in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 300))
        named = [(f"commits.{fails}.{name}", p) for name, p in model.named_parameters()]
        compression = hvd_sparse.Compression.topk(named, density=1.0, dense_below=0)
        compression.exchange_embeddings(named)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=named,
            compression=compression,
        )
        state = hvd.elastic.TorchState(model, optimizer, compression=compression)
        state.sync()
        for step in range(4):
            if fails and step == 2:
                state.save()
                model.zero_grad()
                model(torch.arange(30)).sum().backward()
                compression._engine.wait(10.0)
                hvd.barrier()
                state.restore()
                state.sync()
            model.zero_grad()
            rows = torch.arange(step, step + 9) + hvd.rank()
            model(rows).square().sum().backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        compression.close()
    assert torch.equal(*weights)


def repeat_a_commit() -> None:
    """Two commits of the same number, before and after a fault, are not the same commit."""
    training = Training()
    training.step(3)
    training.state.commit()
    training.step(3)
    if hvd.rank() == 1:
        training.state.save()  # step 6 of a history that is given up
    training.state.restore()
    training.state.sync()
    training.step(3)
    if hvd.rank() != 1:
        training.state.save()  # step 6 once more; rank 1 is still where it was
    committed = training.residual()
    training.state.restore()
    before = training.residual()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.state.sync()
    assert training.state.step == 6
    if hvd.rank() == 1:
        assert training.compression.stats().dropped_l1 == norm(before) > 0
        assert not training.residual().any()
    else:
        assert torch.equal(training.residual(), committed)
    training.compression.close()


def go_on_without_a_restore() -> None:
    """As after a change of hosts that `check_host_updates` finds between two commits."""
    training = Training()
    training.step(3)
    training.state.commit()
    training.step(2)
    before = training.residual()
    step = training.compression.state_dict()["step"]
    training.state.sync()
    assert torch.equal(training.residual(), before)
    assert training.compression.state_dict()["step"] == step == 5
    assert training.compression.stats().dropped_l1 == 0.0
    # Horovod's own: attributes go back to the last commit, weights do not.
    assert training.state.step == 3
    training.state.step = 5
    training.step(2)
    assert not training.missing().any()
    training.compression.close()


def join_late() -> None:
    """The last rank comes new; a worker that is gone took its residual along."""
    training = Training()
    training.step(4)
    training.state.commit()
    kept = training.residual()
    l1 = hvd.allgather(torch.tensor([norm(kept)]).double(), name="commits.l1")
    newcomer = hvd.size() - 1
    training.compression.close()  # as where Horovod is started anew
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if hvd.rank() == newcomer:
            training = Training()
        else:
            training.state.restore()
            training.state.sync()
    stats = training.compression.stats()
    assert stats.dropped_l1 == 0.0
    if hvd.rank() == newcomer:
        assert stats.lost_l1 == 0.0
        assert not training.residual().any()
    else:
        assert stats.lost_l1 == float(l1[newcomer]) > 0
        assert torch.equal(training.residual(), kept)
        training.state.restore()
        assert training.compression.stats().lost_l1 == 0.0
    if hvd.rank() == newcomer:
        training.state.restore()
    training.state.sync()  # it is counted once
    if hvd.rank() != newcomer:
        assert training.compression.stats().lost_l1 == float(l1[newcomer])
    training.step(2)
    training.state.commit()
    assert training.compression.stats().lost_l1 == stats.lost_l1
    training.compression.close()


def join_after_a_reassignment() -> None:
    """A worker that comes has the constructor's method, and gets that of the others."""
    training = Training()
    training.step(2)
    training.compression.reassign(hvd_sparse.Compression.topk(density=0.5))
    training.step(2)
    training.state.commit()
    training.compression.close()
    if hvd.rank() == hvd.size() - 1:
        training = Training()
    else:
        training.state.restore()
        training.state.sync()
    training.step(2)
    assert "0.5" in training.compression.method.description
    training.compression.close()


def save_alone_between_two_commits() -> None:
    """Marks stay those of one step on all ranks."""
    training = Training()
    training.state.sync()
    training.step(2)
    if hvd.rank() == 1:
        training.state.save()
    training.step(2)
    training.state.commit()
    training.step(1)
    training.state.restore()
    training.state.sync()
    assert training.compression.state_dict()["step"] == 4
    training.compression.close()


def forget_the_compression(how: str) -> list[str]:
    """Train by `hvd.elastic.run` with a state that lacks the compression, or has it."""
    training = Training()
    parts: dict[str, Any] = {"compression": training.compression} if how == "remembered" else {}
    state = hvd.elastic.TorchState(training.model, training.optimizer, step=0, **parts)
    training.state = state

    @hvd.elastic.run
    def train(state: Any) -> None:
        training.step(2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "not elastic":
            training.step(2)
        else:
            train(state)
    training.compression.close()
    return [str(w.message) for w in caught if "hvd_sparse" in str(w.message)]


def fail_in_a_commit() -> str:
    """Rank 1 gives up in its commit: the others are told who, and keep their last one."""
    training = Training()
    training.step(2)
    training.state.commit()
    at_2 = training.residual()
    training.step(2)
    hvd.barrier()  # rank 1 is not to fail while another is still in its step
    if hvd.rank() == 1:
        training.compression._engine.fail(RuntimeError("the reason of rank 1"))
    with pytest.raises(HorovodInternalError) as raised:
        training.state.commit()
    training.state.restore()
    assert training.state.step == 2
    assert torch.equal(training.residual(), at_2)
    training.compression.close()
    hvd.barrier()
    return str(raised.value)


worlds = with_ranks(World(3))


@worlds
@pytest.mark.parametrize("join", [join_after_a_reassignment, save_alone_between_two_commits])
def test_all_ranks_stand_where_rank_0_does(ranks: Ranks, join: Callable[[], None]) -> None:
    ranks.run(join)


@worlds
@pytest.mark.parametrize("ahead", [[0], [1], [0, 2], [1, 2]], ids=str)
def test_a_model_and_residuals_of_two_commits_never_go_on_together(
    ranks: Ranks, ahead: list[int]
) -> None:
    ranks.run(come_together, ahead)


@worlds
def test_commits_of_two_histories_are_not_taken_for_one(ranks: Ranks) -> None:
    ranks.run(repeat_a_commit)


@worlds
def test_a_change_of_hosts_between_two_commits_costs_nothing(ranks: Ranks) -> None:
    ranks.run(go_on_without_a_restore)


@worlds
def test_what_went_with_a_worker_is_counted_once(ranks: Ranks) -> None:
    ranks.run(join_late)


@worlds
def test_a_state_without_the_compression_is_warned_of(ranks: Ranks) -> None:
    for rank in ranks.run(forget_the_compression, "forgotten"):
        assert [m for m in rank.result if "pass TorchState(..., compression=" in m], rank
    for how in ("remembered", "not elastic"):
        for rank in ranks.run(forget_the_compression, how):
            assert rank.result == []


@worlds
def test_a_step_that_fails_after_its_reduction_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(fail_after_a_reduction)


@worlds
def test_a_step_that_fails_is_given_up_at_once(ranks: Ranks) -> None:
    assert max(rank.result for rank in ranks.run(fail_while_others_are_late)) < LATE_S / 2


@worlds
def test_a_step_that_fails_with_an_embedding_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(fail_with_an_embedding)


@worlds
def test_who_fails_in_a_commit_is_named(ranks: Ranks) -> None:
    for rank in ranks.run(fail_in_a_commit):
        assert "the reason of rank 1" in rank.result
