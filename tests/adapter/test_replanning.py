"""A planner that restarts or changes its mind in the middle of a training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.session import RunOptions, Session
from hvd_sparse.engine import Engine
from hvd_sparse.engine.residuals import RELEASED_SHARE
from hvd_sparse.lab.report.log import read_runs
from hvd_sparse.lab.report.page import report_page
from hvd_sparse.methods import METHODS
from hvd_sparse.planner import planner as planner_module
from hvd_sparse.transports import Transport, run_ranks
from tests.plans import policy_with_a_profile
from tests.ranks import Ranks, World, with_ranks

NUMEL = 20_000
SPARSE_STEPS = 150
RECALLED_STEPS = 20
RELEASING_STEPS = 40


class Steps:
    """What steps take by the planner's clock, whatever they take."""

    def __init__(self) -> None:
        self.planner: Any = None
        self.sparse_s = 0.02

    def slowest(self, ranks: Sequence[Tensor]) -> list[tuple[float, float]]:
        step_s = self.sparse_s if self.planner.current.placements else 0.1
        return [(step_s, 0.9 * step_s)] * len(ranks[0])


class Training:
    """One parameter, whose gradients have a part in common: its residual grows long."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(NUMEL))
        self.step = 0

    def connect(
        self, policy: dict[str, Any], record: str, state: dict[str, Any] | None = None
    ) -> Any:
        self.weight = nn.Parameter(self.weight.detach().clone())
        named = [("planned.weight", self.weight)]
        compression = hvd_sparse.Compression.from_policy(policy, named, record=record)
        if state is not None:
            compression.load_state_dict(state)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], 1e-3), named_parameters=named, compression=compression
        )
        return compression

    def train(self) -> float:
        """One step; the norm of what the optimizer sees, in units of the average gradient's."""
        gradients = [
            1 + torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * self.step + rank))
            for rank in range(hvd.size())
        ]
        self.optimizer.zero_grad()
        self.weight.mul(gradients[hvd.rank()]).sum().backward()
        self.optimizer.step()
        self.step += 1
        assert self.weight.grad is not None
        return float(self.weight.grad.norm() / (sum(gradients) / hvd.size()).norm())


def train_through_changes(record: str) -> None:
    """At density 0.001 a residual is a hundred gradients long, and no step brings it at once."""
    clock, training = Steps(), Training()
    with (
        mock.patch.object(planner_module, "slowest", clock.slowest),
        mock.patch.object(planner_module, "REVIEW_INTERVAL_STEPS", SPARSE_STEPS),
        mock.patch.object(planner_module, "RECALLED_REVIEW_STEPS", RECALLED_STEPS),
        mock.patch.object(planner_module, "TRIAL_SHARE", 1.0),
    ):
        policy = policy_with_a_profile(hvd.size(), density=0.001)
        compression = training.connect(policy, record)
        clock.planner = compression.method
        training.train()
        while clock.planner.is_trying:
            training.train()
        sparse = [training.train() for _ in range(SPARSE_STEPS - 5)]
        plan = clock.planner.current.placements
        assert plan

        state = compression.state_dict()
        compression.close()
        compression = training.connect(policy, record, state)
        clock.planner = compression.method
        again = [training.train() for _ in range(RECALLED_STEPS)]
        assert clock.planner.current.placements == plan
        assert not clock.planner.is_trying
        assert max(again) < 1.2 * max(sparse)
        saved = compression.state_dict()
        long = float(saved["residual"]["planned.weight"].norm())
        assert long > 50 * NUMEL**0.5

        clock.sparse_s = 0.5
        training.train()  # the review
        assert clock.planner.is_trying
        tried = waited = 0
        while clock.planner.is_trying:
            norm = training.train()  # reviews are at the begin of a step
            if clock.planner.current.placements:
                tried += 1
                assert norm < 1.2 * max(*sparse, *again)
            elif clock.planner.is_trying:
                waited += 1
                assert abs(norm - 1.0) < 1e-3  # what waits goes on waiting
        assert tried
        assert waited
        assert not clock.planner.current.placements
        after = [training.train() for _ in range(RELEASING_STEPS)]
        assert max(after) < 1.0 + 1.2 * RELEASED_SHARE
        assert min(after) > 1.0 + 0.5 * RELEASED_SHARE  # it is on its way
        dense = compression.state_dict()
        assert float(dense["residual"]["planned.weight"].norm()) < long

        compression.load_state_dict(saved)  # as after a loss that went wrong: its plan goes on
        assert training.train() < 1.2 * max(*sparse, *again)
        assert clock.planner.current.placements == plan
        assert not clock.planner.is_trying

        compression.load_state_dict(dense)  # from where there is a plan, and no step between
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.train()
        assert not clock.planner.current.placements
        assert not caught, caught[0].message
    compression.close()


@with_ranks(World(2))
def test_no_norm_spikes_when_a_planner_restarts_or_changes_its_mind(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(train_through_changes, str(tmp_path / "run.jsonl"))
    runs = read_runs(tmp_path / "run.jsonl")
    told = [[(t["chosen"] > 0, t["recalled"]) for t in run.trials] for run in runs]
    assert told == [[(True, False)], [(True, True), (False, False), (True, True), (False, True)]]
    page = report_page(runs, runs[1])
    assert "The planner chose plan" in page
    assert "as an earlier run had found" in page
    assert "The planner stayed dense, at step" in page


def test_a_plan_begins_in_the_order_of_rank_0s_gradients() -> None:
    arrivals = (["b", "a"], ["a", "b"])

    def worker(transport: Transport) -> list[str]:
        method = METHODS["topk"]().make()
        session = Session(Engine(method), RunOptions(timeout_s=1.0))
        session._transport = transport
        session._parameters = Parameters([(n, nn.Parameter(torch.zeros(3))) for n in "abcd"])
        session.arrivals = arrivals[transport.rank]
        return [spec.name for spec in session._specs_as_they_come()]

    assert run_ranks(2, worker) == [["b", "a", "d", "c"]] * 2


def give_up_the_step_of_a_review() -> None:
    model = nn.Linear(100, 100)
    named = [(f"given_up.{name}", p) for name, p in model.named_parameters()]
    compression = hvd_sparse.Compression.from_policy(policy_with_a_profile(2), named)
    optimizer = hvd.DistributedOptimizer(
        *(torch.optim.SGD(model.parameters(), 0.01), named, compression)
    )
    given_up = 0
    for _ in range(450):
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
        planning = compression._session.planning
        if planning is not None and planning.is_due and not given_up:
            optimizer.load_state_dict(optimizer.state_dict())
            given_up += 1
        else:
            optimizer.step()
    assert given_up == 1
    assert not planning._planner.is_trying
    compression.close()


@with_ranks(World(2))
def test_a_trial_ends_though_the_step_of_a_review_is_given_up(ranks: Ranks) -> None:
    ranks.run(give_up_the_step_of_a_review)
