"""Lossless exchanges train to the weights that Horovod's own do, by every way to reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse.planner import Planner
from hvd_sparse.planner.trial import TURN_STEPS
from tests.asleep import allreduce, meet, synchronize_asleep
from tests.launch import horovodrun
from tests.plans import FIRST_TURN_STEPS, AllDense, policy_with_a_profile
from tests.ranks import Ranks, World, with_ranks
from tests.serve import ALL_BUT_RANK_0

STEPS = 4
ROUNDED = (
    *("channels_last", "reassigned_to_dense"),
    *("planned_with_local_momentum", "planned_with_global_momentum"),
    *("reassigned_to_a_plan_with_local_momentum", "reassigned_to_a_plan_with_global_momentum"),
)
"""What adds the same numbers in another order."""
Scenario = Callable[["Run"], nn.Module]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Run:
    """One of the two trainings of a scenario: what differs between them."""

    def __init__(self, scenario: str, method: str, sparse: bool) -> None:
        self.label = f"{scenario}.{method}.{'sparse' if sparse else 'dense'}"
        self.method, self.sparse = method, sparse
        self._compressions: list[Any] = []
        torch.manual_seed(7)

    def named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Names of this run's own: Horovod caches what it knows of a tensor under its name."""
        return [(f"{self.label}.{name}", p) for name, p in model.named_parameters()]

    def compression(self, model: nn.Module | None, **arguments: Any) -> Any:
        if not self.sparse:
            return hvd.Compression.none
        named = None if model is None else self.named(model)
        arguments = {"density": 1.0, "dense_below": 0, "bucket_numel": 600, **arguments}
        compression = getattr(hvd_sparse.Compression, self.method)(
            named, timeout_s=120.0, **arguments
        )
        self._compressions.append(compression)
        return compression

    def distributed(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, **arguments: Any
    ) -> Any:
        compression = arguments.pop("compression", None) or self.compression(model)
        distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.named(model),
            compression=compression,
            **arguments,
        )
        if self.sparse:
            self._compressions.append(compression)
        else:  # as with hvd_sparse, lest ranks that spin starve the others
            synchronize_asleep(distributed)
        return distributed

    def close(self) -> None:
        """Ends what the ranks, which go on, would carry through all scenarios to come."""
        for compression in self._compressions:
            compression.close()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.middle = nn.Linear(30, 30)
        self.last = nn.Linear(30, 3)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        if not skip:
            x = torch.tanh(self.middle(x))
        return self.last(x)


def data(step: int, rank: int | None = None, features: int = 20) -> Tensor:
    seed = 1000 * step + (hvd.rank() if rank is None else rank)
    return torch.randn(8, features, generator=torch.Generator().manual_seed(seed))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, zero_grad: Callable[[], None] | None = None) -> None:
    for step in range(STEPS):
        (zero_grad or model.zero_grad)()
        model(data(step)).square().mean().backward()
        optimizer.step()


@scenario
def average(run: Run) -> nn.Module:
    model = Net()
    train(model, run.distributed(sgd(model), model))
    return model


@scenario
def summed(run: Run) -> nn.Module:
    model = Net()
    train(model, run.distributed(sgd(model), model, op=hvd.Sum))
    return model


@scenario
def predivide(run: Run) -> nn.Module:
    model = Net()
    train(model, run.distributed(sgd(model), model, gradient_predivide_factor=2.0))
    return model


@scenario
def groups(run: Run) -> nn.Module:
    model = Net()
    lists = [list(model.first.parameters()), list(model.last.parameters())]
    train(model, run.distributed(sgd(model), model, groups=lists))
    return model


@scenario
def num_groups(run: Run) -> nn.Module:
    model = Net()
    train(model, run.distributed(sgd(model), model, num_groups=2))
    return model


@scenario
def backward_passes(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model, backward_passes_per_step=3)
    for step in range(STEPS):
        model.zero_grad()
        for part in range(3):
            model(data(10 * step + part)).square().mean().backward()
        optimizer.step()
    return model


@scenario
def clip_and_skip_synchronize(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model)
    for step in range(STEPS):
        model.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    return model


@scenario
def grad_scaler(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        model.zero_grad()
        loss = model(data(step)).square().mean()
        if step == 1 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**10, scaler.get_scale()  # halved once, doubled once
    return model


@scenario
def adam(run: Run) -> nn.Module:
    model = Net()
    train(model, run.distributed(torch.optim.Adam(model.parameters(), lr=0.01), model))
    return model


@scenario
def unused_on_one_rank(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model)
    for step in range(STEPS):
        model.zero_grad()
        model(data(step), skip=hvd.rank() == 0).square().mean().backward()
        optimizer.step()
    return model


@scenario
def unused_everywhere(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model)
    for step in range(STEPS):
        model.zero_grad()
        model(data(step), skip=True).square().mean().backward()
        optimizer.step()
    return model


@scenario
def process_sets(run: Run) -> nn.Module:
    """The members train together; rank 0 is in no set that does, and trains alone."""
    model = Net()
    train(model, run.distributed(sgd(model), model, process_set=ALL_BUT_RANK_0[0]))
    return model


@scenario
def zero_grad_in_place(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model)
    train(model, optimizer, lambda: model.zero_grad(set_to_none=False))
    return model


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 20, sparse=True)
        self.net = Net()

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(self.embedding(rows))


def _train_embedding(run: Run, **arguments: Any) -> nn.Module:
    model = Recommender()
    optimizer = run.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model, **arguments)
    for step in range(STEPS):
        model.zero_grad()
        rows = torch.arange(6) * (step + 2) % 50 + hvd.rank()
        model(rows % 50).square().mean().backward()
        optimizer.step()
    return model


@scenario
def sparse_embedding(run: Run) -> nn.Module:
    return _train_embedding(run)


@scenario
def sparse_as_dense(run: Run) -> nn.Module:
    return _train_embedding(run, sparse_as_dense=True)


@scenario
def float16(run: Run) -> nn.Module:
    model = Net().half()
    optimizer = run.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(STEPS):
        model.zero_grad()
        model(data(step).half()).float().square().mean().backward()
        optimizer.step()
    return model


@scenario
def bfloat16(run: Run) -> nn.Module:
    """Horovod cannot reduce bfloat16: the reference averages in float32 by hand."""
    model = Net().bfloat16()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if run.sparse:
        optimizer = run.distributed(optimizer, model)
    for step in range(STEPS):
        model.zero_grad()
        model(data(step).bfloat16()).float().square().mean().backward()
        if not run.sparse:
            for name, p in model.named_parameters():
                p.grad = allreduce(p.grad.float(), f"reference.{name}").bfloat16()
        optimizer.step()
    return model


@scenario
def channels_last(run: Run) -> nn.Module:
    """Horovod refuses strided gradients: the reference trains in the ordinary layout."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten())
    if run.sparse:
        model = model.to(memory_format=torch.channels_last)
    optimizer = run.distributed(sgd(model), model)
    for step in range(STEPS):
        model.zero_grad()
        images = data(step, features=3 * 6 * 6).view(8, 3, 6, 6)
        model(images).square().mean().backward()
        if run.sparse:  # else this scenario would test nothing
            assert not model[0].weight.grad.is_contiguous()
        else:
            for p in model.parameters():
                p.grad = p.grad.contiguous()
        optimizer.step()
    return model


@scenario
def load_state_dict_between_steps(run: Run) -> nn.Module:
    model = Net()
    optimizer = run.distributed(sgd(model), model)
    train(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer)
    return model


@scenario
def unnamed_parameters(run: Run) -> nn.Module:
    model = Net()
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=run.compression(None))
    train(model, optimizer)
    return model


@scenario
def small_tensors_dense(run: Run) -> nn.Module:
    model = Net()
    compression = run.compression(model, **({"dense_below": 100} if run.sparse else {}))
    train(model, run.distributed(sgd(model), model, compression=compression))
    if run.sparse:
        names = {name for bucket in compression.stats().buckets for name in bucket.names}
        assert names == {f"{run.label}.{n}.weight" for n in ("first", "middle")}, names
    return model


@scenario
def direct_allreduce(run: Run) -> nn.Module:
    """`hvd.allreduce(compression=…)` of a tensor that is nobody's gradient is left to Horovod."""
    model = Net()
    compression = run.compression(model)
    train(model, run.distributed(sgd(model), model, compression=compression))
    mean = hvd.allreduce(torch.ones(5) * hvd.rank(), name="direct", compression=compression)
    assert torch.equal(mean, torch.full((5,), (hvd.size() - 1) / 2)), mean
    return model


@scenario
def state_saved_and_loaded(run: Run) -> nn.Module:
    model = Net()
    compression = run.compression(model)
    optimizer = run.distributed(sgd(model), model, compression=compression)
    train(model, optimizer)
    if run.sparse:
        compression.load_state_dict(compression.state_dict())
    train(model, optimizer)
    return model


@scenario
def reassigned_to_dense(run: Run) -> nn.Module:
    """What was not sent at a low density is, once everything goes dense; in whole numbers.

    A non-finite gradient in the very step of the change, which the optimizer does not apply, must
    not cost the residuals either.
    """
    model = Net()
    for p in model.parameters():
        p.data.zero_()
    compression = run.compression(model, **({"density": 0.1} if run.sparse else {}))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = run.distributed(sgd, model, compression=compression)
    for step in range(4 * STEPS):  # in three of four, residuals are released bit by bit
        if run.sparse and step == STEPS:
            assert any(r.any() for r in compression.state_dict()["residual"].values())
            compression.reassign(AllDense())
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        for p in model.parameters():
            gradient = torch.randint(-9, 10, p.shape, generator=generator).float()
            if step == STEPS and hvd.rank() == 0:
                gradient.view(-1)[0] = float("inf")
            p.mul(gradient).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            if all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
    if run.sparse:
        assert not compression.state_dict()["residual"]
    return model


def momentum_changes_sides(run: Run, nesterov: bool) -> nn.Module:
    """From the optimizer to each kind of the compression's and back; in whole numbers."""
    model = Net()
    for p in model.parameters():
        p.data.zero_()
    momentum: dict[str, Any] = {"momentum": 0.5, "nesterov": nesterov}
    compression: Any = hvd.Compression.none
    ways: list[Any] = [AllDense()]
    if run.sparse:
        local, both = (
            run.compression(model, momentum_kind=kind, **momentum).method
            for kind in ("local", "global")
        )
        compression = run.compression(model, **momentum)
        ways += [local, AllDense(), both, local, both, AllDense()]
    else:
        ways += 6 * ways
    ours = hvd_sparse.MomentumCorrectedSGD(model.parameters(), 0.5, 0.5, nesterov=nesterov)
    optimizer = run.distributed(ours, model, compression=compression)
    for number, way in enumerate(ways):
        if run.sparse:
            compression.reassign(way)
        for step in range(2 if number else 1):
            model.zero_grad()
            generator = torch.Generator().manual_seed(100 * number + 10 * step + hvd.rank())
            for p in model.parameters():
                gradient = torch.randint(-9, 10, p.shape, generator=generator).float()
                p.mul(gradient).sum().backward()
            optimizer.step()
    return model


@scenario
def momentum_handed_over(run: Run) -> nn.Module:
    return momentum_changes_sides(run, nesterov=False)


@scenario
def nesterov_handed_over(run: Run) -> nn.Module:
    return momentum_changes_sides(run, nesterov=True)


@scenario
def policy(run: Run) -> nn.Module:
    """Two compressors, a named bucket and dense tensors in one model; changed half-way."""
    model = Net()
    rules: list[dict[str, Any]] = [
        {"match": {"name": "*.bias"}, "compress": "never"},
        {"match": {"name": "*.first.*"}, "compressor": "topk", "bucket": "first"},
        {"match": {"module": "Linear"}, "compressor": "oktopk"},
    ]
    first = {"version": 1, "defaults": {"density": 1.0}, "rules": rules}
    second = {**first, "rules": rules[2:]}
    compression: Any = hvd.Compression.none
    if run.sparse:
        from_policy = partial(
            hvd_sparse.Compression.from_policy, named_parameters=run.named(model), model=model
        )
        compression = from_policy(first)
    optimizer = run.distributed(sgd(model), model, compression=compression)
    train(model, optimizer)
    if run.sparse:
        assert [b.names for b in compression.stats().buckets][-1] == (f"{run.label}.first.weight",)
        compression.reassign(from_policy(second).method)
    train(model, optimizer)
    if run.sparse:
        (bucket,) = compression.stats().buckets
        assert len(bucket.names) == 6
    return model


@scenario
def planned(run: Run) -> nn.Module:
    """Dense, then sparse by plans that a profile of a slow network promises much of."""
    model = Net()
    compression: Any = hvd.Compression.none
    steps = FIRST_TURN_STEPS + TURN_STEPS + 3
    if run.sparse:
        compression = hvd_sparse.Compression.from_policy(
            policy_with_a_profile(hvd.size()), run.named(model)
        )
    optimizer = run.distributed(sgd(model), model, compression=compression)
    for step in range(steps):
        model.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
        if run.sparse:
            sparse = FIRST_TURN_STEPS <= step < FIRST_TURN_STEPS + TURN_STEPS
            if step < FIRST_TURN_STEPS + TURN_STEPS:
                assert bool(compression.stats().buckets) == sparse, step
                assert bool(compression.method.plan.placements) == sparse, step
    return model


def planned_with_momentum(run: Run, kind: str) -> nn.Module:
    """Momentum changes sides whenever the plan does, and goes on over two restarts.

    The first one is by the plan that holds. After the second one all is dense, whose state had the
    momentum on the compression's side: rank 0 has another key.
    """
    model = Net()
    steps = FIRST_TURN_STEPS + TURN_STEPS + 3
    if not run.sparse:
        optimizer = torch.optim.SGD(model.parameters(), 0.5, 0.5)
        distributed = run.distributed(optimizer, model)
        for step in range(steps):
            model.zero_grad()
            model(data(step)).square().mean().backward()
            distributed.step()
        return model
    policy = policy_with_a_profile(hvd.size(), momentum=0.5, momentum_kind=kind)

    def made(model: nn.Module) -> tuple[Any, Any]:
        compression = hvd_sparse.Compression.from_policy(policy, run.named(model))
        ours = hvd_sparse.MomentumCorrectedSGD(model.parameters(), 0.5, 0.5)
        return compression, run.distributed(ours, model, compression=compression)

    sparse_until = FIRST_TURN_STEPS + TURN_STEPS - 1
    compression, distributed = made(model)
    for step in range(steps):
        if step in (sparse_until - 2, sparse_until):
            states = model.state_dict(), compression.state_dict(), distributed.state_dict()
            compression.close()
            model = Net()
            compression, distributed = made(model)
            model.load_state_dict(states[0])
            distributed.load_state_dict(states[2])
            plan = states[1]["planner"]
            if step < sparse_until:  # as if the trial had ended with what was tried last
                plan = {**plan, "found": concluded(plan)}
            else:
                plan = {**plan, "found": None}
            compression.load_state_dict({**states[1], "planner": plan})
        model.zero_grad()
        model(data(step)).square().mean().backward()
        distributed.step()
        sparse = FIRST_TURN_STEPS <= step < sparse_until
        assert bool(compression.method.plan.placements) == sparse, step
        weight = next(iter(model.parameters()))
        has_own = "momentum_buffer" in distributed.state[weight]
        assert has_own == (not sparse), step
    return model


def concluded(plan: dict[str, Any]) -> dict[str, Any]:
    """What a planner would have found, had its trial ended with the plan that it trains by."""
    method = next(iter(plan["placements"].values()))["method"]
    took = {"step_s": 1.0, "error_s": 0.1, "reduction_s": 0.5, "steps": 5}
    tried = {"methods": [method], "sparse_tensors": 6, "buckets": 1, "predicted_s": 1.0}
    chosen = {"placements": plan["placements"], "predicted_s": 1.0, "dense_s": 2.0}
    outcome = {"tried": [{**tried, "took": took}], "chosen": 0, "plan": chosen}
    return {**plan["found"], "outcome": outcome}


def reassigned_to_a_plan(run: Run, kind: str) -> nn.Module:
    """Momentum goes straight to where a planner wants it that remembers its plan.

    Whatever the planner knew of where momentum was: here it has always been the compression's.
    """
    model = Net()
    steps = FIRST_TURN_STEPS + 9
    momentum = {"momentum": 0.5, "momentum_kind": kind}
    policy: dict[str, Any] = {}
    compression: Any = hvd.Compression.none
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.5, 0.5)
    if run.sparse:
        policy = policy_with_a_profile(hvd.size(), **momentum)
        compression = hvd_sparse.Compression.from_policy(policy, run.named(model))
        optimizer = hvd_sparse.MomentumCorrectedSGD(model.parameters(), 0.5, 0.5)
    distributed = run.distributed(optimizer, model, compression=compression)
    plans: list[dict[str, Any]] = []
    for step in range(steps):
        if run.sparse and step == FIRST_TURN_STEPS + 1:
            plan = compression.state_dict()["planner"]
            plans = [{**plan, "found": concluded(plan)} for _ in range(2)]
            plans[1]["placements"] = {}
        if run.sparse and step in (FIRST_TURN_STEPS + 1, FIRST_TURN_STEPS + 5):
            corrected = hvd_sparse.Compression.topk(density=1.0, **momentum)
            compression.reassign(corrected.method)
        if run.sparse and step in (FIRST_TURN_STEPS + 3, FIRST_TURN_STEPS + 7):
            planner = hvd_sparse.Compression.from_policy(policy, run.named(model)).method
            assert isinstance(planner, Planner)
            planner.load_state_dict(plans.pop())
            compression.reassign(planner)
            assert planner.current.placements
            weight = next(iter(model.parameters()))
            assert "momentum_buffer" not in distributed.state[weight]
        if run.sparse and step == FIRST_TURN_STEPS + 8:
            compression.reassign(compression.method)  # as after a change of type
            assert not compression._engine.planned
        model.zero_grad()
        model(data(step)).square().mean().backward()
        distributed.step()
    return model


PLANNED: dict[str, Scenario] = {
    f"{name}_with_{kind}_momentum": partial(train_by, kind=kind)
    for kind in ("local", "global")
    for name, train_by in {
        "planned": planned_with_momentum,
        "reassigned_to_a_plan": reassigned_to_a_plan,
    }.items()
}


def compare(name: str, dense: nn.Module, sparse: nn.Module) -> None:
    for (parameter, expected), actual in zip(
        dense.named_parameters(), sparse.parameters(), strict=True
    ):
        if hvd.size() == 2 and name not in ROUNDED:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=None)
        elif actual.dtype == torch.float32:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        else:
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
        assert torch.isfinite(actual).all(), parameter


def check(name: str, method: str) -> None:
    """Runs a scenario with and without compression by a method, and compares what comes of it."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="optimizer.step\\(\\) called without")
    warnings.filterwarnings("ignore", message=".*density 1 sends all entries")  # as is wanted here
    train_by = (SCENARIOS | PLANNED)[name]
    dense = train_by(Run(name, method, sparse=False))
    sparse = Run(name, method, sparse=True)
    compare(name, dense, train_by(sparse))
    meet(name)
    sparse.close()


LOSSLESS_IN = {World(2, "mpi"): "topk", World(3): "oktopk"}


@with_ranks(*LOSSLESS_IN)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_lossless_exchange_trains_to_the_same_weights(ranks: Ranks, scenario: str) -> None:
    ranks.run(check, scenario, LOSSLESS_IN[ranks.world])


@with_ranks(World(2))
@pytest.mark.parametrize("scenario", PLANNED)
def test_a_planner_hands_momentum_over(ranks: Ranks, scenario: str) -> None:
    ranks.run(check, scenario, "topk")


@pytest.mark.launches
def test_an_impossible_transport_says_why() -> None:
    env = {"HVD_SPARSE_TRANSPORT": "mpi"}
    done = horovodrun(2, check, "average", "topk", env=env, timeout=90, check=False)
    assert done.returncode != 0
    assert "HVD_SPARSE_TRANSPORT" in done.stdout + done.stderr
