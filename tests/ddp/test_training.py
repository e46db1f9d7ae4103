"""Trainings under DDP, beside plain DDP, and what is refused."""

from __future__ import annotations

import copy
import gc
import io
import os
import sys
import time
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import hvd_sparse
from hvd_sparse import Compression
from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.adapter.ddp_door import GroupBootstrap
from hvd_sparse.errors import ConfigError, UnsupportedError
from hvd_sparse.methods import METHODS
from hvd_sparse.planner.trial import TURN_STEPS
from tests.ddp.training import Books, batch, trained
from tests.plans import FIRST_TURN_STEPS, policy_with_a_profile
from tests.ranks import Ranks, World, with_ranks

STEPS = 6
LATE_S = 1.0


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step, dtype=dtype)).square().mean().backward()
        optimizer.step()


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in module.parameters()])


def assert_alike_on_all_ranks(module: nn.Module) -> None:
    mine = weights(module)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    assert all(torch.equal(mine, each) for each in theirs)


def trained_weights(compression: SparseCompressor | None, **options: Any) -> Tensor:
    with trained(compression, **options) as (model, module):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert_alike_on_all_ranks(module)
        return weights(module)


def equal_plain_ddp(options: dict[str, Any]) -> None:
    made = Compression.topk(density=1.0, dense_below=100, timeout_s=30)
    assert torch.equal(trained_weights(made, **options), trained_weights(None, **options))
    assert "horovod.torch" not in sys.modules


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}], ids=str
)
@with_ranks(World(2, "torchrun"))
def test_density_one_is_plain_ddp(ranks: Ranks, options: dict[str, Any]) -> None:
    ranks.run(equal_plain_ddp, options)


def every_constructor() -> None:
    for name in METHODS:
        options = {"threshold": 0.01} if name == "hard_threshold" else {}
        options |= {"momentum": 0.0} if name == "dgc" else {}
        made = getattr(Compression, name)(density=0.05, dense_below=100, timeout_s=30, **options)
        trained_weights(made)
        assert made.stats().steps == STEPS, name


def other_types(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        made = Compression.topk(density=1.0, dense_below=100, timeout_s=30)
        ours, plain = trained_weights(made), trained_weights(None)
        rounding = 2e-3 if dtype == torch.float16 else 0.0  # DDP sums in float16
        torch.testing.assert_close(ours, plain, rtol=0.0, atol=rounding)
    finally:
        torch.set_default_dtype(torch.float32)


def two_levels() -> None:
    """Each two of four ranks have an agent of their own, and so count as a host."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    books = Books(0.05, arguments={"hierarchical": True})
    for _ in range(STEPS):
        books.backward()
        books.step()
    held = books.compression.state_dict()["residual"].values()
    assert any(each.any() for each in held)  # with one host nothing waits
    books.check()


def planned() -> None:
    """Dense, then sparse by plans that a profile of a slow network promises much of."""
    made = Compression.from_policy(policy_with_a_profile(dist.get_world_size()))
    steps, found = FIRST_TURN_STEPS + TURN_STEPS + 3, []
    for compression in (made, None):
        with trained(compression) as (model, module):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(steps):
                train(model, optimizer, 1, first=step)
                if compression is not None and step < FIRST_TURN_STEPS + TURN_STEPS:
                    assert bool(compression.stats().buckets) == (step >= FIRST_TURN_STEPS), step
            found.append(weights(module))
    assert torch.equal(*found)


def a_subgroup() -> None:
    """The first and the last of three ranks train together, and the middle one not at all."""
    pair = dist.new_group([0, 2])
    made = Compression.topk(density=0.05, dense_below=100)
    if dist.get_rank() != 1:
        with trained(made, process_group=pair) as (model, module):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
            theirs = [torch.empty_like(weights(module)) for _ in range(2)]
            dist.all_gather(theirs, weights(module), group=pair)
            assert torch.equal(*theirs)
            assert made.stats().totals.bytes_sent > 0
    dist.barrier()


def momentum_corrected() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    plain = copy.deepcopy(module)
    optimizer, made = hvd_sparse.dgc_sgd(
        module.named_parameters(), lr=0.1, density=1.0, dense_below=100, timeout_s=30
    )
    model = DistributedDataParallel(module)
    hvd_sparse.ddp.register(model, made)
    train(model, optimizer)
    made.close()
    model = DistributedDataParallel(plain)
    train(model, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    assert torch.allclose(weights(module), weights(plain), rtol=1e-4, atol=1e-5)


def adamw() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    plain = copy.deepcopy(module)
    named = list(module.named_parameters())
    optimizer, made = hvd_sparse.sparse_adamw(
        named, lr=1e-2, betas=(0.0, 0.999), density=1.0, dense_below=100, timeout_s=30
    )
    model = DistributedDataParallel(module)
    hvd_sparse.ddp.register(model, made)
    train(model, optimizer)
    made.close()
    model = DistributedDataParallel(plain)
    train(model, torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.0, 0.999)))
    assert torch.allclose(weights(module), weights(plain), rtol=1e-4, atol=1e-5)
    assert all("exponent" in optimizer.state[p] for p in module.parameters())


def a_scaler_skips() -> None:
    """Its inf throws a step away: nothing of it moves, and residuals follow the scale."""
    books = Books(0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(2 * STEPS):
        gradients = books.draw()
        is_lost = step in (2, 7)
        loss = books.model(gradients) * (float("inf") if is_lost else 1.0)
        scaler.scale(loss).backward()
        for name, gradient in gradients.items() if not is_lost else ():
            books.expected[name] += gradient
        scaler.step(books.optimizer)
        scaler.update()
        books.optimizer.zero_grad()
    assert books.compression.stats().skipped_steps == 2
    books.check()


def continues_from_a_checkpoint(folder: str) -> None:
    def made() -> SparseCompressor:
        return Compression.topk(density=0.05, dense_below=100, timeout_s=30)

    whole = made()
    with trained(whole) as (model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        train(model, optimizer, 3)
        whole.save_checkpoint(folder)
        kept = copy.deepcopy(module.state_dict())
        train(model, optimizer, 3, first=3)
        expected = weights(module)
    again = made()
    with trained(again) as (model, module):
        module.load_state_dict(kept)
        again.load_checkpoint(folder)
        train(model, torch.optim.SGD(module.parameters(), lr=0.1), 3, first=3)
        assert torch.equal(weights(module), expected)


def sparse_embeddings(exchanged: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(50, 32, sparse=True), nn.Linear(32, 40))

    found = []
    for made in (Compression.topk(density=1.0, dense_below=100, timeout_s=30), None):
        torch.manual_seed(0)
        module = make()
        if made is not None and exchanged:
            made.exchange_embeddings(module.named_parameters())
        model = DistributedDataParallel(module)
        if made is not None:
            hvd_sparse.ddp.register(model, made)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            words = torch.arange(12).view(3, 4) * (dist.get_rank() + 1) + step
            model(words).square().mean().backward()
            optimizer.step()
        found.append(weights(module))
    assert torch.allclose(*found, rtol=1e-5, atol=1e-6)


def compiled() -> None:
    """Modules with a name of the compiler's in front of theirs."""
    with trained(compression := Compression.topk(density=0.05, dense_below=0)) as (model, module):
        train(torch.compile(model, backend="eager"), torch.optim.SGD(module.parameters(), lr=0.1))
        assert compression.state_dict()["residual"].keys() == dict(module.named_parameters()).keys()
        assert_alike_on_all_ranks(module)


def a_compiled_step() -> None:
    """The backward pass, and so the hook, is in a compiled function."""
    found = []
    for made in (None, Compression.topk(density=1.0, dense_below=100)):
        with trained(None) as (model, module):
            if made is not None:
                hvd_sparse.ddp.register(torch.compile(model, backend="eager"), made)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            step = torch.compile(partial(train_once, model, optimizer), backend="eager")
            for number in range(STEPS):
                step(batch(number))
            found.append(weights(module))
    assert torch.equal(*found)


def train_once(model: nn.Module, optimizer: Any, inputs: Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, as many libraries' Lookahead; `__init__` is not the base's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: dict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: dict[int, Any] = OrderedDict()
        self.inner, self.defaults = optimizer, optimizer.defaults
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._patch_step_function()

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def a_wrapped_optimizer() -> None:
    found = []
    for made in (None, Compression.topk(density=1.0, dense_below=100)):
        with trained(made) as (model, module):
            train(model, Wrapper(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)))
            found.append(weights(module))
    assert torch.equal(*found)


class SharedOut(torch.optim.Optimizer):
    """Has the states of its own share of the parameters alone, as Muon has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, p in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=self.param_groups[0]["lr"])
            dist.broadcast(p, owner)


def a_rate_of_zero_where_states_are_shared_out() -> None:
    """Momenta have taken the gradients in: all ranks judge so, though each has some of them."""
    found = []
    for shares_out in (False, True):
        made = Compression.topk(density=0.05, dense_below=100)
        with trained(made) as (model, module):
            own = list(module.parameters())
            optimizer = SharedOut(own) if shares_out else torch.optim.SGD(own, 0.0, momentum=0.9)
            train(model, optimizer, 1)
            waiting = made.state_dict()["residual"]
            found.append(torch.cat([waiting[name].flatten() for name in sorted(waiting)]))
    assert torch.equal(*found)


def a_step_with_a_closure() -> None:
    with trained(Compression.topk(density=1.0, dense_below=100)) as (model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(STEPS):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch(step)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        with trained(None) as (model, plain):
            train(model, torch.optim.SGD(plain.parameters(), lr=0.1))
        assert torch.equal(weights(module), weights(plain))


class Products(nn.Module):
    """Sums of its parameters, times a number."""

    def __init__(self, *parameters: Tensor) -> None:
        super().__init__()
        self.values = nn.ParameterList(parameters)

    def forward(self, x: float) -> Tensor:
        products = [p * x for p in self.values]
        return torch.stack([(y.abs() if y.is_complex() else y).sum() for y in products]).sum()


def complex_numbers() -> None:
    found = []
    for made in (Compression.topk(density=1.0, dense_below=10), None):
        torch.manual_seed(0)
        module = Products(torch.randn(6, 4, dtype=torch.complex64), torch.randn(40))
        model = DistributedDataParallel(module)
        if made is not None:
            hvd_sparse.ddp.register(model, made)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(1.0 + step + dist.get_rank()).backward()
            optimizer.step()
        found.append(torch.view_as_real(module.values[0].detach()))
    assert torch.equal(*found)


def large_halves() -> None:
    """The sum of the ranks has no float16, but their mean has one."""
    module = Products(torch.zeros(20, dtype=torch.float16))
    model = DistributedDataParallel(module)
    made = hvd_sparse.ddp.register(model, Compression.topk())
    model(40_000.0).backward()
    assert module.values[0].grad.eq(40_000).all()
    made.close()


def two_models_of_one_optimizer() -> None:
    """Each asks its own compression whether a momentum was applied already."""
    makers: dict[str, Any] = {
        "dgc_sgd": (hvd_sparse.MomentumCorrectedSGD, {"momentum": 0.9, "momentum_kind": "local"}),
        "adamw": (hvd_sparse.SparseAdamW, {"preconditioned": True}),
    }
    for make, arguments in makers.values():
        found = []
        for is_shared in (False, True):
            torch.manual_seed(0)
            modules = [nn.Linear(32, 64), nn.Linear(64, 40)]
            models = [DistributedDataParallel(module) for module in modules]
            for model in models:
                made = Compression.topk(density=1.0, dense_below=100, **arguments)
                hvd_sparse.ddp.register(model, made)
            own = [list(module.parameters()) for module in modules]
            optimizers = [make(p, lr=0.01) for p in ([[*own[0], *own[1]]] if is_shared else own)]
            for step in range(STEPS):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                models[1](models[0](batch(step))).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
            found.append(torch.cat([weights(module) for module in modules]))
            copy.deepcopy(optimizers[0])
        assert torch.equal(*found)


def a_copy_of_a_model() -> None:
    """It is torch's copy: without a hook, until it gets one of its own."""
    with trained(Compression.topk(density=0.05, dense_below=100)) as (model, module):
        train(model, torch.optim.SGD(module.parameters(), lr=0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has none of the residuals
            copied = copy.deepcopy(model)
            torch.save(model, io.BytesIO())
        made = hvd_sparse.ddp.register(copied, Compression.topk(density=0.05, dense_below=100))
        train(copied, torch.optim.SGD(copied.parameters(), lr=0.1))
        assert made.stats().totals.bytes_sent
        assert_alike_on_all_ranks(copied.module)
        made.close()


def a_sharded_optimizer_warms_up() -> None:
    """Its first step has rate 0, and a state for the share of this rank alone."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: its import warns

    found = []
    for make in (
        torch.optim.Adam,
        partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam),
    ):
        made = Compression.topk(density=0.05, dense_below=100)
        with trained(made) as (model, module):
            optimizer: Any = make(module.parameters(), lr=0.0, betas=(0.0, 0.999))
            train(model, optimizer, 1)
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            train(model, optimizer, 3, first=1)
            held = made.state_dict()["residual"]
            found.append(torch.cat([weights(module), *(r.flatten() for r in held.values())]))
    assert torch.equal(*found)


class Talks(torch.autograd.Function):
    """It communicates in its backward pass, in a group of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mine,) = gradients
        dist.all_reduce(mine, group=ctx.group)
        return mine, None


def the_script_communicates_in_backward() -> None:
    """One rank does so before its last bucket comes, the other one after it."""
    group, found = dist.new_group(), []
    for made in (Compression.topk(density=1.0, dense_below=100, timeout_s=8), None):
        with trained(made) as (model, module):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                x = torch.ones(4, requires_grad=True)
                first = Talks.apply(x, group) if dist.get_rank() else None
                loss = model(batch(step)).square().mean()
                ((Talks.apply(x, group) if first is None else first).sum() + loss).backward()
                assert torch.equal(x.grad, torch.full((4,), 2.0))
                optimizer.step()
            found.append(weights(module))
    assert torch.equal(*found)


def weights_moved_by_hand() -> None:
    with (
        trained(Compression.topk(density=0.05, dense_below=100)) as (model, module),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for step in range(5):
            model(batch(step)).square().mean().backward()
            with torch.no_grad():
                for p in module.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
    assert any("compression.applied()" in str(each.message) for each in caught)


def gradients_by_hand_of_what_is_unused() -> None:
    """DDP leaves them as they are, on each rank its own."""
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        found = []
        for made in (Compression.topk(density=1.0, dense_below=100), None):
            torch.manual_seed(0)
            module = nn.ModuleList([nn.Linear(32, 64, bias=False) for _ in range(2)])
            module.forward = module[0].forward  # type: ignore[method-assign]
            model = DistributedDataParallel(module, **options)  # type: ignore[arg-type]
            if made is not None:
                hvd_sparse.ddp.register(model, made)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                own = module[1].weight
                own.grad = torch.full_like(own, 1.0 + dist.get_rank())
                model(batch(step)).square().mean().backward()
                optimizer.step()
            found.append(weights(module))
        assert torch.equal(*found)


def momentum_twice() -> None:
    """Each pass reduces, and adds to what the pass before has brought back with its momentum."""
    made = Compression.dgc(density=1.0, momentum=0.9, dense_below=100)
    with trained(made) as (model, module):
        optimizer = hvd_sparse.MomentumCorrectedSGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            with model.no_sync():
                model(batch(step)).square().mean().backward()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        with pytest.raises(UnsupportedError, match=r"by model\.no_sync\(\)"):
            model(batch(3)).square().mean().backward()


def a_gradient_is_kept() -> None:
    """It keeps its values, as under plain DDP."""
    found = []
    for made in (Compression.topk(density=1.0, dense_below=100), None):
        torch.manual_seed(0)
        module = nn.Linear(32, 64)
        model = DistributedDataParallel(module)
        if made is not None:
            hvd_sparse.ddp.register(model, made)
        optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                model(batch(step)).square().mean().backward()
            model(batch(step + 1)).square().mean().backward()
            optimizer.step()
            kept.append(module.weight.grad)
        found.append(torch.stack([each for each in kept if each is not None]))
    torch.testing.assert_close(*found)


def two_wrappers_of_one_parameter() -> None:
    """The optimizer cannot tell which of them has brought a gradient, and its momentum."""
    for name in ("dgc", "preconditioned", "topk"):
        for is_second in (False, True):
            module = nn.Linear(32, 64)
            made = [Compression.topk(), Compression.topk()]
            if name == "dgc":
                made[is_second] = Compression.dgc(momentum=0.9)
            elif name == "preconditioned":
                made[is_second] = Compression.topk(preconditioned=True)
            models = [DistributedDataParallel(module) for _ in made]
            hvd_sparse.ddp.register(models[0], made[0])
            if name == "topk":
                hvd_sparse.ddp.register(models[1], made[1])
                with pytest.raises(UnsupportedError, match="by another wrapper, too"):
                    made[is_second].reassign(Compression.dgc(momentum=0.9))
                continue
            with pytest.raises(UnsupportedError, match="by another wrapper, too"):
                hvd_sparse.ddp.register(models[1], made[1])


def two_wrappers_in_one_pass() -> None:
    """Each puts its result into the gradient that they share, which is zeroed in place."""
    found = []
    for density in (None, 1.0, 0.05):
        torch.manual_seed(0)
        body, heads = nn.Linear(32, 64), [nn.Linear(64, 8), nn.Linear(64, 8)]
        models = [DistributedDataParallel(nn.Sequential(body, head)) for head in heads]
        made = [Compression.topk(density=density) for _ in models if density is not None]
        for model, compression in zip(models, made, strict=False):
            hvd_sparse.ddp.register(model, compression)
        parameters = [*body.parameters(), *heads[0].parameters(), *heads[1].parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            sum(model(batch(step)).square().mean() for model in models).backward()
            optimizer.step()
        for module in (body, *heads):
            assert_alike_on_all_ranks(module)
        found.append(torch.cat([weights(module) for module in (body, *heads)]))
    assert torch.equal(found[0], found[1])


def a_critic_with_momentum() -> None:
    """What the generator's pass adds to the critic's applied gradients is zeroed before its own."""
    torch.manual_seed(0)
    modules = nn.Linear(32, 64), nn.Linear(64, 1)
    made = [Compression.topk(), Compression.dgc(momentum=0.9, dense_below=0)]
    generator, critic = map(DistributedDataParallel, modules)
    for model, compression in zip((generator, critic), made, strict=True):
        hvd_sparse.ddp.register(model, compression)
    optimizers = [torch.optim.SGD(generator.parameters(), lr=0.1)]
    optimizers += [hvd_sparse.MomentumCorrectedSGD(critic.parameters(), lr=0.1, momentum=0.9)]
    for set_to_none in (True, False):
        for step in range(3):
            optimizers[1].zero_grad(set_to_none)
            critic(generator(batch(step)).detach()).square().mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad(set_to_none)
            critic(generator(batch(step))).mean().backward()
            optimizers[0].step()
    for module in modules:
        assert_alike_on_all_ranks(module)
    optimizers[1].zero_grad()
    critic(generator(batch(0)).detach()).square().mean().backward()
    optimizers[1].step()
    critic(generator(batch(0)).detach()).square().mean().backward()
    with pytest.raises(UnsupportedError, match="would be reduced again"):
        optimizers[1].step()


def ignored_by_ddp() -> None:
    """A parameter that DDP leaves to the script is none of the compression's."""
    module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    compression = Compression.dgc(module.named_parameters(), momentum=0.9, dense_below=0)
    model = DistributedDataParallel(module)
    hvd_sparse.ddp.register(model, compression)
    own = torch.optim.Adam([module[1].weight])
    rest = [p for name, p in module.named_parameters() if name != "1.weight"]
    optimizer = hvd_sparse.MomentumCorrectedSGD(rest, lr=0.1, momentum=0.9)
    for step in range(3):
        for each in (own, optimizer):
            each.zero_grad()
        model(batch(step)).square().mean().backward()
        for each in (own, optimizer):
            each.step()
    assert "1.weight" not in compression.state_dict()["residual"]
    compression.close()


def two_wrappers_and_a_loss_scaler() -> None:
    """Each follows the scale, though the parameters know the second one alone."""
    module, made = nn.Linear(32, 64), [Compression.topk(), Compression.topk()]
    models = [DistributedDataParallel(module) for _ in made]
    for model, each in zip(models, made, strict=True):
        hvd_sparse.ddp.register(model, each)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(models[step % 2](batch(step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [each.state_dict()["unit"] for each in made] == [64.0, 64.0]


def momentum_of_a_second_optimizer() -> None:
    """A change of the compression is checked against all of them."""
    made = Compression.topk(dense_below=100)
    with trained(made) as (model, module):
        weight, *others = module.parameters()
        optimizers = [torch.optim.SGD(others, lr=0.1)]
        optimizers += [torch.optim.SGD([weight], lr=0.1, momentum=0.9)]
        for step in range(2):
            model(batch(step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(ConfigError, match="would apply momentum a second time"):
            made.reassign(Compression.dgc(momentum=0.9))


def a_wait_is_counted() -> None:
    made = Compression.topk(density=0.05, dense_below=100)
    with trained(made) as (model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        train(model, optimizer, 4)  # in some of the first, ranks meet
        before = made.stats()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        train(model, optimizer, 1)
        assert dist.get_rank() == 1 or made.stats().since(before).totals.wait_s > LATE_S / 2


def embeddings_late() -> None:
    """No optimizer has stepped yet."""
    made = Compression.topk(dense_below=100)
    with trained(made) as (model, module):
        model(batch(0)).square().mean().backward()
        with pytest.raises(ConfigError, match="must be called before the first backward pass"):
            made.exchange_embeddings(module.named_parameters())


class Ramps(nn.Module):
    """Of two parameters, the second's gradients are so small that they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(3000)) for _ in range(2))

    @override
    def forward(self) -> Tensor:
        return (100.0 * self.a).sum() + self.b.sum()


def zeroed_for_two_optimizers() -> None:
    """One of them has only what was zeros before: the other one's tensors tell."""
    for zeroes in (True, False):
        made = Compression.topk(density=0.02, dense_below=100)
        module = Ramps()
        model = DistributedDataParallel(module)
        hvd_sparse.ddp.register(model, made)
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (module.a, module.b)]
        for _ in range(3):
            module.zero_grad(set_to_none=False)
            model().backward()
            for p in module.parameters():
                p.grad.mul_(0.0 if zeroes else 0.5)  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
        waits = made.state_dict()["residual"]["b"].abs().max()
        assert waits == (0.0 if zeroes else 3.0)
        made.close()


def a_wrapper_is_gone() -> None:
    """What it had is still in the script's hands; plain DDP goes on."""
    module = nn.Linear(32, 64)
    made = Compression.dgc(density=0.05, momentum=0.9, dense_below=100)
    model = DistributedDataParallel(module)
    hvd_sparse.ddp.register(model, made)
    train(model, hvd_sparse.MomentumCorrectedSGD(module.parameters(), lr=0.1, momentum=0.9))
    del model
    gc.collect()
    plain = DistributedDataParallel(module)
    train(plain, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    made.close()


def adamw_is_resumed() -> None:
    """Its units are there in the first pass, before an optimizer has stepped."""
    states: Any = None
    ends = []
    for resumes in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 40))
        model = DistributedDataParallel(module)
        optimizer, made = hvd_sparse.sparse_adamw(
            module.named_parameters(), lr=0.01, density=0.02, dense_steps=2, dense_below=100
        )
        hvd_sparse.ddp.register(model, made)
        if resumes:
            for each, state in zip((module, optimizer, made), states, strict=True):
                each.load_state_dict(state)
        else:
            train(model, optimizer, 12)
            parts = (module.state_dict(), optimizer.state_dict(), made.state_dict())
            states = copy.deepcopy(parts)
        train(model, optimizer, 6, first=12)
        made.close()
        ends.append(weights(module))
    assert torch.equal(*ends)


def idle_tensors() -> None:
    """Nobody zeroes what no optimizer has, and it grows from pass to pass."""
    with (
        trained(Compression.topk(density=0.05, dense_below=100)) as (model, module),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        train(model, torch.optim.SGD([*module.children()][-1].parameters(), lr=0.1), 20)
    told = [str(each.message) for each in caught if "no optimizer that" in str(each.message)]
    assert len(told) == 1
    assert "nor 1 other tensors" in told[0]


def checkpoints_beside_idle_tensors(path: str) -> None:
    """What no optimizer has is never applied, and so never too late."""
    compression = Compression.topk(density=0.05, dense_below=100)
    with trained(compression) as (model, module):
        optimizer = torch.optim.SGD([*module.children()][-1].parameters(), lr=0.1)
        for _ in range(3):
            train(model, optimizer, 2)
            compression.save_checkpoint(path)
            compression.state_dict()


def one_tensor_moved_by_hand() -> None:
    """Beside an optimizer that has the others."""
    with (
        trained(Compression.topk(density=0.05, dense_below=100)) as (model, module),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        own, *others = module.parameters()
        optimizer = torch.optim.SGD(others, lr=0.1)
        for step in range(5):
            module.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            own.data.sub_(own.grad, alpha=0.1)  # type: ignore[arg-type]
    assert any("compression.applied()" in str(each.message) for each in caught)


def another_model_of_one_compression() -> None:
    """The first one is gone, as where layers were thawed and the model was wrapped again."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 40))
    made = Compression.topk(module.named_parameters(), density=0.05, dense_below=100)
    held: dict[str, Tensor] = {}
    for thaws in (False, True):
        module[0].requires_grad_(thaws)
        model = DistributedDataParallel(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvd_sparse.ddp.register(model, made)
            if thaws:
                assert torch.equal(made.state_dict()["residual"]["1.weight"], held["1.weight"])
            for _ in range(2):  # optimizers, of which the first is gone when weights move on
                train(model, torch.optim.SGD(module.parameters(), lr=0.1), 3)
        with pytest.raises(ConfigError, match="serves one model"):
            hvd_sparse.ddp.register(DistributedDataParallel(module), made)
        assert_alike_on_all_ranks(module)
        held = made.state_dict()["residual"]
        assert held["1.weight"].any()
        del model
        gc.collect()
    assert held.keys() == {"0.weight", "1.weight"}
    made.close()


SCENARIOS: dict[str, tuple[Any, ...]] = {
    "complex": (complex_numbers,),
    "large halves": (large_halves,),
    "two models": (two_models_of_one_optimizer,),
    "a copy": (a_copy_of_a_model,),
    "by hand": (weights_moved_by_hand,),
    "a sharded optimizer": (a_sharded_optimizer_warms_up,),
    "every constructor": (every_constructor,),
    "bfloat16": (other_types, torch.bfloat16),
    "float16": (other_types, torch.float16),
    "float64": (other_types, torch.float64),
    "planned": (planned,),
    "dgc_sgd": (momentum_corrected,),
    "sparse_adamw": (adamw,),
    "a scaler skips": (a_scaler_skips,),
    "embeddings, gathered": (sparse_embeddings, False),
    "embeddings, exchanged": (sparse_embeddings, True),
    "compiled": (compiled,),
    "a compiled step": (a_compiled_step,),
    "a wrapped optimizer": (a_wrapped_optimizer,),
    "states are shared out": (a_rate_of_zero_where_states_are_shared_out,),
    "a closure": (a_step_with_a_closure,),
    "communicates": (the_script_communicates_in_backward,),
    "momentum twice": (momentum_twice,),
    "a kept gradient": (a_gradient_is_kept,),
    "two wrappers": (two_wrappers_of_one_parameter,),
    "two wrappers, one pass": (two_wrappers_in_one_pass,),
    "ignored": (ignored_by_ddp,),
    "a critic": (a_critic_with_momentum,),
    "a wrapper is gone": (a_wrapper_is_gone,),
    "two wrappers, scaled": (two_wrappers_and_a_loss_scaler,),
    "momentum of a second": (momentum_of_a_second_optimizer,),
    "late embeddings": (embeddings_late,),
    "a wait": (a_wait_is_counted,),
    "zeroed for two": (zeroed_for_two_optimizers,),
    "sparse_adamw, resumed": (adamw_is_resumed,),
    "idle tensors": (idle_tensors,),
    "one by hand": (one_tensor_moved_by_hand,),
    "another model": (another_model_of_one_compression,),
    "unused, by hand": (gradients_by_hand_of_what_is_unused,),
}


@pytest.mark.parametrize("name", SCENARIOS)
@with_ranks(World(2, "torchrun"))
def test_what_horovods_door_has(ranks: Ranks, name: str) -> None:
    ranks.run(*SCENARIOS[name])


@with_ranks(World(3, "torchrun"))
def test_two_of_three_ranks_train(ranks: Ranks) -> None:
    ranks.run(a_subgroup)


@with_ranks(World(4, "torchrun"))
def test_two_levels_of_two_agents(ranks: Ranks) -> None:
    ranks.run(two_levels)


@with_ranks(World(2, "torchrun"))
def test_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(continues_from_a_checkpoint, str(tmp_path / "checkpoint"))
    ranks.run(checkpoints_beside_idle_tensors, str(tmp_path / "idle"))


class Mixed(nn.Module):
    """Tensors of several types, which DDP puts into several buckets, also in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(50, 32, sparse=True)
        self.body = nn.Linear(32, 40)
        self.wide = nn.Linear(40, 30, dtype=torch.float64)
        self.turned = nn.Parameter(torch.ones(30, dtype=torch.complex128))

    @override
    def forward(self, at: Tensor) -> Tensor:
        return (self.wide(self.body(self.rows(at)).double()) * self.turned).abs()


def train_many_types(static_graph: bool) -> None:
    ends = []
    for made in (None, Compression.topk(density=1.0, dense_below=100, timeout_s=20)):
        torch.manual_seed(0)
        module = Mixed()
        model = DistributedDataParallel(module, static_graph=static_graph)
        if made is not None:
            hvd_sparse.ddp.register(model, made)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            at = torch.arange(12).view(3, 4) * (dist.get_rank() + 1) + step
            model(at).square().mean().backward()
            optimizer.step()
        ends.append(weights(module))
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-6)
    assert made is not None
    made.close()


@pytest.mark.parametrize("static_graph", [False, True])
@with_ranks(World(2, "torchrun"))
def test_several_types_and_a_static_graph(ranks: Ranks, static_graph: bool) -> None:
    ranks.run(train_many_types, static_graph)


def go_back_with_another_optimizer() -> None:
    made = Compression.topk(density=0.05, dense_below=100)
    with trained(made) as (model, module):
        train(model, torch.optim.SGD(module.parameters(), lr=0.1), 2)
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        train(model, optimizer, 2)
        states = [copy.deepcopy(each.state_dict()) for each in (module, optimizer)]
        train(model, optimizer, 2)
        module.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        with pytest.warns(UserWarning, match="dropped the residuals"):
            train(model, optimizer, 1)


@with_ranks(World(2, "torchrun"))
def test_each_optimizer_may_go_back(ranks: Ranks) -> None:
    ranks.run(go_back_with_another_optimizer)


def resume_by_torchs_functions(folder: str) -> None:
    """The optimizer's state comes last but one, and for it a step of rate 0 is made."""

    def made() -> SparseCompressor:
        return Compression.topk(density=0.05, dense_below=100)

    with trained(compression := made()) as (model, module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, betas=(0.0, 0.999))
        train(model, optimizer, 2)
        compression.save_checkpoint(folder)
        kept = get_optimizer_state_dict(model, optimizer)
        states = copy.deepcopy([kept, module.state_dict(), compression.state_dict()])
        train(model, optimizer, 1)
        expected = weights(module)
    compression = made()
    compression.load_checkpoint(folder)  # also where there is no model yet
    with trained(compression) as (model, module):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, betas=(0.0, 0.999))
        for loads_again in (False, True):
            if loads_again:
                compression.load_state_dict(states[2])
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(states[0]))  # it takes them
            module.load_state_dict(states[1])
            train(model, optimizer, 1)
            assert compression.stats().dropped_l1 == 0
            assert torch.equal(weights(module), expected)


@with_ranks(World(2, "torchrun"))
def test_a_state_is_resumed_by_torchs_functions(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(resume_by_torchs_functions, str(tmp_path))


# -- refusals --------------------------------------------------------------------------------------


def register_badly() -> None:
    module = nn.Linear(32, 64)
    with pytest.raises(hvd_sparse.ConfigError, match="DistributedDataParallel, got a Linear"):
        hvd_sparse.ddp.register(module, Compression.topk())  # type: ignore[arg-type]
    model = DistributedDataParallel(module)
    with pytest.raises(hvd_sparse.ConfigError, match="must be one of hvd_sparse"):
        hvd_sparse.ddp.register(model, "topk")  # type: ignore[arg-type]
    made = hvd_sparse.ddp.register(model, Compression.topk)
    with pytest.raises(hvd_sparse.ConfigError, match=r"one communication hook, .* already"):
        hvd_sparse.ddp.register(model, Compression.topk())
    other = DistributedDataParallel(nn.Linear(3, 3))
    with pytest.raises(hvd_sparse.ConfigError, match="serves one model"):
        hvd_sparse.ddp.register(other, made)
    other.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(hvd_sparse.ConfigError, match="fp16_compress_hook already"):
        hvd_sparse.ddp.register(other, Compression.topk())
    options = ("skip_all_reduce_unused_params", "_use_python_reducer", "_delay_all_reduce_params")
    for option in options:
        other = DistributedDataParallel(nn.Linear(3, 3))
        setattr(other, option, True)
        with pytest.raises(hvd_sparse.UnsupportedError, match=option):
            hvd_sparse.ddp.register(other, Compression.topk())
    named = list(nn.Linear(3, 3).named_parameters())
    with pytest.raises(hvd_sparse.ConfigError, match="must be those of the model's 2 parameters"):
        hvd_sparse.ddp.register(DistributedDataParallel(nn.Linear(3, 3)), Compression.topk(named))


def train_badly() -> None:
    for set_to_none in (True, False):
        with trained(Compression.topk(dense_below=100)) as (model, module):
            optimizer = torch.optim.LBFGS(module.parameters())

            def closure(set_to_none: bool = set_to_none) -> float:
                optimizer.zero_grad(set_to_none=set_to_none)  # noqa: B023
                loss = model(batch(0)).square().mean()
                loss.backward()
                return float(loss.detach())

            told = "called its closure more than once"
            with pytest.raises(hvd_sparse.UnsupportedError, match=told):
                optimizer.step(closure)
    with trained(Compression.topk(dense_below=100)) as (model, _):  # noqa: SIM117
        with model.join(), pytest.raises(hvd_sparse.UnsupportedError, match=r"model\.join"):
            model(batch(0)).sum().backward()
    made = Compression.topk(dense_below=100)
    with trained(made) as (model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        train(model, optimizer, 2)
        model(batch(0)).sum().backward()
        made.state_dict()
        with pytest.raises(hvd_sparse.ConfigError, match=r"state_dict.* between steps.*backward"):
            optimizer.step()
    made = Compression.topk(dense_below=100)
    with trained(made, bucket_cap_mb=0.001) as (model, module):
        train(model, torch.optim.SGD(module.parameters(), lr=0.1), 2)
        module[0].weight.register_hook(lambda _: made.close())  # the last layer's are under way
        with pytest.raises(hvd_sparse.ConfigError, match=r"got a call within one"):
            model(batch(0)).sum().backward()
    with trained(Compression.dgc(dense_below=100)) as (model, module):  # noqa: SIM117
        with pytest.raises(hvd_sparse.ConfigError, match="momentum a second time"):
            train(model, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    with warnings.catch_warnings(record=True) as caught, trained(Compression.topk()) as (model, m):
        warnings.simplefilter("always")
        train(model, torch.optim.AdamW(m.parameters(), lr=0.1))
    assert any("sparse_adamw" in str(each.message) for each in caught)


@pytest.mark.parametrize("scenario", [register_badly, train_badly])
@with_ranks(World(2, "torchrun"))
def test_refused(ranks: Ranks, scenario: Any) -> None:
    ranks.run(scenario)


def test_ranks_that_have_met_before_meet_in_a_new_store() -> None:
    """Names of groups come again, and ranks have met in them as often as they may."""
    for meetings in (3, 1):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            for _ in range(meetings):
                assert GroupBootstrap(None).allgather_object("here", "link", 5.0) == ["here"]
            store: Any = distributed_c10d._get_process_group_store(dist.group.WORLD)
            told = distributed_c10d.PrefixStore("hvd_sparse/0", store)
            assert told.check([f"link/{meetings}/0"])  # where the others look, too
        finally:
            dist.destroy_process_group()
