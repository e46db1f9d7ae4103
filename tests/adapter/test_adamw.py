"""`sparse_adamw`: AdamW whose compressed gradients have their momentum in residuals."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse import Compression, ConfigError, SparseAdamW, UnsupportedError
from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.handover import refuse_momenta
from hvd_sparse.optim import REDUCED_BY, exponents, reducer_of
from tests.ranks import Ranks, World, with_ranks

LR, DECAY = 0.01, 0.1


LEADS = SimpleNamespace(preconditions=lambda parameter: True)
"""A door behind which the gradients of its parameters were selected."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"foreach": True},
        {"fused": True},
        {"maximize": True, "foreach": True},
        {"amsgrad": True},
    ],
    ids=str,
)
def test_it_is_torchs_adamw_bit_for_bit(options: dict[str, Any]) -> None:
    """β1 = 0 where a compression selects, and β1 elsewhere; gradients stay what they are."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(37, 11, generator=generator) for _ in range(2)]
    theirs, ours = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    without, with_m = (
        torch.optim.AdamW([p], LR, (beta1, 0.999), weight_decay=DECAY, **options)
        for p, beta1 in zip(theirs, (0.0, 0.9), strict=True)
    )
    optimizer = SparseAdamW(ours, LR, weight_decay=DECAY, **options)
    REDUCED_BY[ours[0]] = lambda: LEADS
    for _ in range(40):
        for p, q in zip(theirs, ours, strict=True):
            p.grad = torch.randn(37, 11, generator=generator)
            q.grad = p.grad.clone()
        versions = [p.grad._version for p in ours if p.grad is not None]
        for each in (without, with_m, optimizer):
            each.step()
        assert versions == [p.grad._version for p in ours if p.grad is not None]
        assert all(torch.equal(p, q) for p, q in zip(theirs, ours, strict=True))
    assert "exp_avg" not in optimizer.state[ours[0]]

    torchs = torch.optim.AdamW(ours, LR, (0.0, 0.999), weight_decay=DECAY, **options)
    torchs.load_state_dict(optimizer.state_dict())  # a run goes on densely, and back
    again = SparseAdamW(ours, LR, **options)
    again.load_state_dict(torchs.state_dict())
    for each in (torchs, again):
        each.step()
    assert again.state[ours[0]]["exponent"].dtype == torch.int8
    with_m_state = with_m.state_dict()
    again.load_state_dict({**with_m_state, "param_groups": again.state_dict()["param_groups"]})
    assert not again.state[ours[0]]["exponent"].any()


def test_units_are_roots_and_what_was_never_sent_is_like_the_others() -> None:
    v = torch.tensor([[0.0, 1.0, 2.0], [0.5, 4.0, 1e-12]])
    found, unseen, turned = exponents([(each, 1e-8) for each in (v, torch.zeros(2), v.t())])
    assert found.tolist() == [[-4, 0, 1], [0, 1, -20]]
    assert unseen.tolist() == [-4, -4]
    assert turned.is_contiguous()
    assert exponents([(torch.zeros(2), 1e-8)])[0].tolist() == [0, 0]


def test_a_state_is_there_from_the_start() -> None:
    """Else Horovod makes it by a step, which decays the weights of a worker that has just come."""
    weight, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = SparseAdamW([weight, frozen], LR)
    assert not optimizer.state[frozen]  # a look at a moment, which makes an entry
    state = optimizer.state_dict()
    assert {key for key, its in state["state"].items() if its} == {0}
    theirs = torch.optim.AdamW([weight, frozen], LR)
    assert not theirs.state[frozen]
    weight.grad = torch.full((4,), 8.0)
    theirs.step()
    REDUCED_BY[weight] = lambda: LEADS
    optimizer.load_state_dict(theirs.state_dict())
    for _ in range(32):
        optimizer.step()
    assert optimizer.state[weight]["exponent"].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("habit", ["unused", "a group of its own", "dense", "looked at"])
def test_a_tensor_that_comes_late_is_like_the_others_at_once(habit: str) -> None:
    """Else none of its entries is sent until the next look at √v, and then nothing else is."""
    first, late = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))
    optimizer = SparseAdamW([first], LR)
    optimizer.param_groups[0]["params"] += [late] if habit != "a group of its own" else []
    REDUCED_BY[first] = REDUCED_BY[late] = lambda: LEADS
    for step in range(39):
        first.grad, late.grad = torch.full((4,), 8.0), torch.zeros(3) if step == 38 else None
        if step == 38 and habit == "a group of its own":
            optimizer.add_param_group({"params": [late]})
        if habit == "looked at":
            optimizer.state_dict()
        if habit == "dense":
            late.grad = torch.full((3,), 8.0)
            REDUCED_BY.pop(late, None)
            REDUCED_BY.update([(late, lambda: LEADS)] if step == 38 else [])
        optimizer.step()
    assert optimizer.state[first]["exponent"].tolist() == [3, 3, 3, 3]
    assert optimizer.state[late]["exponent"].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False, "amsgrad": True}], ids=str
)
def test_complex_parameters_are_torchs(options: dict[str, Any]) -> None:
    ends = []
    for make in (torch.optim.AdamW, SparseAdamW):
        p = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        optimizer = make([p], LR, **options)
        for step in range(3):
            p.grad = torch.arange(5) * torch.tensor(1.0 - 2j) + step
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.NAdam, True),
        (SparseAdamW, True),
        (lambda p: torch.optim.Adam(p, betas=(0.0, 0.999)), False),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), False),
    ],
)
def test_adams_momentum_after_error_feedback_is_warned_of(make: Any, told: bool) -> None:
    model = nn.Linear(40, 40)
    optimizer, parameters = make(model.parameters()), Parameters(model.named_parameters())
    for method, expected in (
        (Compression.oktopk().method, told),
        (Compression.oktopk(density=1.0).method, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            refuse_momenta(optimizer, parameters, method, 1024)
        assert len(caught) == expected
        assert not caught or "Use hvd_sparse.sparse_adamw, or betas=(0.0, …)" in str(
            caught[0].message
        )
    preconditioned = Compression.topk(preconditioned=True).method
    if isinstance(optimizer, SparseAdamW):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refuse_momenta(optimizer, parameters, preconditioned, 1024)
    else:
        refuse_momenta(make([nn.Parameter(torch.zeros(3))]), parameters, preconditioned, 1024)
        with pytest.raises(ConfigError, match=r"needs hvd_sparse.SparseAdamW .*, got \w+: hvd_sp"):
            refuse_momenta(optimizer, parameters, preconditioned, 1024)


def test_sparse_gradients_are_refused_as_by_torch() -> None:
    table = nn.Embedding(8, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(hvd_sparse.UnsupportedError, match="does not take sparse gradients"):
        SparseAdamW(table.parameters()).step()


def test_the_other_optimizers_state_is_one_of_torchs_sgd() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = hvd_sparse.MomentumCorrectedSGD([p], lr=0.1, momentum=0.9)
    optimizer.step()
    sgd = torch.optim.SGD([p], lr=0.1)
    sgd.load_state_dict(optimizer.state_dict())
    sgd.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 1 - 0.1 - 0.19))

    p.grad = torch.ones(3)  # what a compression makes of gradients, beside what was there before
    corrects = SimpleNamespace(corrects_momentum=lambda parameter: True)
    REDUCED_BY[p] = lambda: corrects
    before, buffer = p.detach().clone(), optimizer.state[p]["momentum_buffer"].clone()
    optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.1 * (1 + 0.9 * buffer))

    q = nn.Parameter(torch.ones(3))
    both = hvd_sparse.MomentumCorrectedSGD([p, q], momentum=0.9)
    both.load_state_dict({**both.state_dict(), "state": {0: optimizer.state_dict()["state"][0]}})
    state = both.state_dict()["state"]  # whole, as torch's checkpoints demand
    assert (state[0]["momentum_buffer"].any(), state[1]["momentum_buffer"].any()) == (True, False)
    both.load_state_dict(both.state_dict())
    both.step()
    assert "momentum_buffer" not in both.state[q]

    with pytest.raises(UnsupportedError, match="neither dampening nor maximize"):
        optimizer.load_state_dict(torch.optim.SGD([p], momentum=0.9, maximize=True).state_dict())
    for option in ({"maximize": True}, {"dampening": 0.5}):
        with pytest.raises(UnsupportedError, match="neither dampening nor maximize"):
            hvd_sparse.MomentumCorrectedSGD([{"params": [p], **option}])


def test_arguments() -> None:
    model = nn.Linear(40, 40)
    optimizer, compression = hvd_sparse.sparse_adamw(
        model.named_parameters(), lr=0.2, weight_decay=0.3, compressor="dgc", density=0.1
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.2, (0.9, 0.999), 0.3)
    method = compression.method
    assert (method.density, method.warmup.dense_steps) == (0.1, 20)
    assert method.memory.preconditioned
    assert method.memory.momentum == 0
    for wrong, told in (
        ({"compressor": "top"}, "compressor must be one of"),
        ({"momentum": 0.9}, "momentum must be 0 where preconditioned is True, got 0.9"),
    ):
        with pytest.raises(ConfigError, match=told):
            hvd_sparse.sparse_adamw(model.named_parameters(), **wrong)


class Training:
    """A model with two large tensors, in groups of their own, and a small one that stays dense."""

    def __init__(self, label: str, compressor: str = "topk", **options: Any) -> None:
        self.model = nn.Module()
        for name, shape in (("large", (60, 50)), ("other", (3000,)), ("bias", (30,))):
            start = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            self.model.register_parameter(f"{label}_{name}", nn.Parameter(start))
        named = list(self.model.named_parameters())
        large, *rest = self.parameters = [p for _, p in named]
        _, self.compression = hvd_sparse.sparse_adamw(named, compressor=compressor, **options)
        groups = [{"params": [large], "weight_decay": DECAY}, {"params": rest, "lr": 3 * LR}]
        self.inner = SparseAdamW(groups, LR, weight_decay=0.0)
        self.optimizer = hvd.DistributedOptimizer(
            self.inner, named_parameters=named, compression=self.compression
        )
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=7)

    def step(self, step: int, spoils: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for p, g in zip(self.parameters, gradients(step, hvd.rank(), self.parameters), strict=True):
            loss = loss + (p * g).sum() * (float("inf") if spoils and hvd.rank() == 1 else 1.0)
        self.scaler.scale(loss).backward()
        self.optimizer.synchronize()
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def check_replicas(self, name: str) -> None:
        for p in self.parameters:
            mean = hvd.allreduce(p.detach().double(), op=hvd.Average, name=f"{name}.{p.numel()}")
            assert torch.equal(mean, p.detach().double())


def gradients(step: int, rank: int, parameters: list[nn.Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    scales = (1.0, 16.0, 4.0)
    pairs = zip(parameters, scales, strict=True)
    return [s * torch.randint(-9, 10, p.shape, generator=generator).float() for p, s in pairs]


def at_density_one() -> None:
    """AdamW of the mean, whose large tensors have β1 = 0."""
    training = Training("one", density=1.0)
    twins = [nn.Parameter(p.detach().clone()) for p in training.parameters]
    groups = [
        {"params": [twins[0]], "weight_decay": DECAY, "betas": (0.0, 0.999)},
        {"params": [twins[1]], "lr": 3 * LR, "betas": (0.0, 0.999)},
        {"params": [twins[2]], "lr": 3 * LR},
    ]
    reference = torch.optim.AdamW(groups, LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 10, 0.5)
    for step in range(40):
        skips = step in (1, 5)
        training.step(step, skips)
        for rank in range(hvd.size()):
            for p, g in zip(twins, gradients(step, rank, twins), strict=True):
                p.grad = g / 2 if rank == 0 or p.grad is None else p.grad + g / 2
        if not skips:
            reference.step()
        schedule.step()
        for p, q in zip(training.parameters, twins, strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-7)
    training.check_replicas("one")
    training.compression.close()


def goes_on(compressor: str, folder: str, hierarchical: bool) -> None:
    """Over skipped steps, and from a checkpoint that one rank has read, bit for bit."""
    options = {"density": 0.05, "dense_steps": 3, "clip_norm": 50.0, "hierarchical": hierarchical}
    training = Training("first", compressor, **options)
    for step in range(45):
        if step == 40:
            training.compression.save_checkpoint(folder)
            states = (training.model, training.optimizer, training.schedule, training.scaler)
            kept = copy.deepcopy([each.state_dict() for each in states])
        training.step(step, step in (2, 20))
        selected = [reducer_of(p).preconditions(p) for p in training.parameters]
        assert selected == [True, True, False]
    training.check_replicas("first")

    again = Training("first", compressor, **options)  # a newcomer's, on every rank but one
    if hvd.rank() == 0:
        again.model.load_state_dict(kept[0])
        again.optimizer.load_state_dict(kept[1])
    hvd.broadcast_optimizer_state(again.optimizer, root_rank=0)
    hvd.broadcast_parameters(again.model.state_dict(), root_rank=0)
    again.schedule.load_state_dict(kept[2])
    again.scaler.load_state_dict(kept[3])
    again.compression.load_checkpoint(folder)
    for step in range(40, 45):
        again.step(step)
    for p, q in zip(training.parameters, again.parameters, strict=True):
        assert torch.equal(p, q)
    is_sparse = again.compression.stats().totals.nnz_applied < 5 * 4 * 0.05 * 6000
    assert is_sparse != hierarchical  # one host has nobody to send to
    for each in (training, again):
        each.compression.close()


@with_ranks(World(2))
def test_it_is_adamw_of_the_mean(ranks: Ranks) -> None:
    ranks.run(at_density_one)


@with_ranks(World(2))
@pytest.mark.parametrize(
    ("compressor", "hierarchical"), [("topk", False), ("oktopk", False), ("topk", True)]
)
def test_it_goes_on_bit_for_bit(
    ranks: Ranks, compressor: str, hierarchical: bool, tmp_path: Path
) -> None:
    ranks.run(goes_on, compressor, str(tmp_path), hierarchical)
