"""Two habits at a time, as ported scripts combine them, beside plain Horovod."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from hvd_sparse import Compression
from tests.plans import AllDense
from tests.ranks import Ranks, World, with_ranks

NUMEL = 3000
ALL = {"dense_below": 0, "timeout_s": 20.0}


def whole(step: int, shape: Sequence[int] = (NUMEL,), most: int = 9) -> Tensor:
    """Whole numbers of this rank's, of which the mean over two ranks is whole, too."""
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    return 2.0 * torch.randint(-most, most + 1, tuple(shape), generator=generator)


def weights(*modules: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for m in modules for p in m.parameters()])


def switches_a_discriminator_off(kind: str) -> None:
    """Between its backward pass and its step, since the generator's pass comes between them."""

    def train(compressed: bool) -> Tensor:
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(40, 40), nn.Linear(40, 30)
        optimizers = []
        for place, module in enumerate((generator, discriminator)):
            tag = f"off.{kind}.{compressed}.{place}"
            named = [(f"{tag}.{name}", p) for name, p in module.named_parameters()]
            made, inner = hvd.Compression.none, None
            if kind == "dgc_sgd":
                inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
                if compressed:
                    inner, made = hvd_sparse.dgc_sgd(named, lr=0.05, density=1.0, **ALL)
            else:
                betas = (0.0, 0.999)
                inner = torch.optim.AdamW(module.parameters(), lr=0.01, betas=betas)
                if compressed:
                    inner, made = hvd_sparse.sparse_adamw(
                        named, lr=0.01, betas=betas, density=1.0, **ALL
                    )
            optimizers.append(
                hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)
            )
        for step in range(4):
            drawn = torch.Generator().manual_seed(10 * step + hvd.rank())
            x = torch.randn(6, 40, generator=drawn)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (discriminator(x) - 1).square().mean().backward()
            discriminator.requires_grad_(False)
            discriminator(generator(x)).square().mean().backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
            discriminator.requires_grad_(True)
        return weights(generator, discriminator)

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


def gives_each_optimizer_all_names() -> None:
    """To Horovod and to both compressions: each has its own half of the model all the same."""

    def train(compressed: bool, scaled: bool) -> tuple[Tensor, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30))
        tag = f"names.{compressed}.{scaled}"
        named = [(f"{tag}.{name}", p) for name, p in model.named_parameters()]
        optimizers, compressions = [], []
        for layer in model:
            made = hvd.Compression.none
            make: Any = torch.optim.SGD
            if compressed:
                made = Compression.dgc(named, momentum=0.9, density=1.0, **ALL)
                make = hvd_sparse.MomentumCorrectedSGD
                compressions.append(made)
            inner = make(layer.parameters(), lr=0.02, momentum=0.9)
            optimizers.append(
                hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)
            )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=scaled)
        for step in range(6):
            drawn = torch.Generator().manual_seed(10 * step + hvd.rank())
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(torch.randn(6, 40, generator=drawn)).square().mean()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            scaler.update()
        return weights(model), [made.state_dict().get("unit") for made in compressions]

    torch.testing.assert_close(train(True, False)[0], train(False, False)[0])
    units = train(True, True)[1]
    assert units[0] == units[1] == 32.0


def names_what_another_optimizer_has() -> None:
    """Each compression has its part's names, and Horovod those of the model: nothing to warn of."""
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30))
    named = [(f"part.{name}", p) for name, p in model.named_parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers = []
        for layer in model:
            own = set(layer.parameters())
            made = Compression.topk([(n, p) for n, p in named if p in own], density=1.0, **ALL)
            inner = torch.optim.SGD(layer.parameters(), lr=0.1)
            optimizers.append(
                hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)
            )
        model(torch.ones(2, 40)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def goes_on_densely_in_half_precision(dtype: torch.dtype) -> None:
    """What waits is sent with the gradients, on one rank for longer than on the other."""

    def train(dtype: torch.dtype, compressed: bool) -> Tensor:
        tag = f"turns.{dtype}.{compressed}"
        named = [
            (f"{tag}.{n}", nn.Parameter(torch.zeros(n, dtype=dtype))) for n in (NUMEL, NUMEL // 2)
        ]
        parameters = [p for _, p in named]
        made: Any = hvd.Compression.none
        if compressed:
            made = Compression.topk(named, density=0.05, dense_below=100, timeout_s=20.0)
        inner = torch.optim.SGD(parameters, lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)
        for step in range(14):
            if compressed and step == 4:
                made.reassign(AllDense())
            optimizer.zero_grad()
            most = 2 if step < 4 or hvd.rank() == 0 else 1
            losses = [(p * whole(step, p.shape, most).to(dtype)).sum() for p in parameters]
            torch.stack(losses).sum().backward()
            optimizer.step()
        ends = []
        held = made.state_dict()["residual"] if compressed else {}
        for name, p in named:
            left = held.get(name, torch.zeros(p.shape)).double()
            ends.append(p.detach().double() - hvd.allreduce(left, name=f"{name}.left"))
        return torch.cat(ends)

    ours, plain = train(dtype, True), train(torch.float32, False)
    rounding = 1.0 if dtype == torch.bfloat16 else 0.05  # of up to 56
    torch.testing.assert_close(ours, plain, rtol=0, atol=rounding)


def takes_the_compression_off() -> None:
    """What it leaves has ordinary momentum, though the script still holds the compression."""
    p = nn.Parameter(torch.zeros(NUMEL))
    named = [("off.p", p)]
    inner, made = hvd_sparse.dgc_sgd(named, lr=0.125, momentum=0.5, density=1.0, **ALL)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)

    def train(optimizer: Any, p: Tensor, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            (p * whole(step)).sum().backward()
            optimizer.step()

    train(optimizer, p, range(3))
    del optimizer
    gc.collect()
    q = nn.Parameter(p.detach().clone())
    again = hvd.DistributedOptimizer(inner, named_parameters=named)
    plain = hvd.DistributedOptimizer(
        torch.optim.SGD([q], lr=0.125, momentum=0.5), named_parameters=[("off.q", q)]
    )
    train(again, p, range(3, 7))
    train(plain, q, range(3, 7))
    assert torch.equal(p, q)
    assert made.stats().steps == 3


def broadcasts_an_earlier_state_of_adamw() -> None:
    """Rank 0 alone goes back, and the others get its weights and its optimizer's state."""
    p = nn.Parameter(torch.zeros(60, 50))
    named = [("earlier", p)]
    inner, made = hvd_sparse.sparse_adamw(
        named, lr=1e-2, betas=(0.0, 0.9), density=0.1, dense_steps=0, **ALL
    )
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)

    def train(steps: range, rates: Tensor) -> None:
        for step in steps:
            optimizer.zero_grad()
            drawn = torch.Generator().manual_seed(10 * step + hvd.rank())
            (p * torch.randn(60, 50, generator=drawn) * rates).sum().backward()
            optimizer.step()

    train(range(8), torch.ones(50))
    kept = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    train(range(8, 21), torch.logspace(-3, 3, 50))
    if hvd.rank() == 0:
        p.data.copy_(kept[0])
        optimizer.load_state_dict(kept[1])
    hvd.broadcast_parameters(named, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert torch.equal(p.detach(), kept[0])
    train(range(21, 24), torch.ones(50))
    ends = hvd.allgather(p.detach()[None], name="earlier.ends")
    assert torch.equal(ends[0], ends[1])
    made.close()


class Spike(Exception):
    """What a script's own look at a step raises."""


def catches_what_its_step_hook_raises() -> None:
    """The weights have moved by then: the step counts."""
    p = nn.Parameter(torch.zeros(NUMEL))
    named = [("spike", p)]
    made = Compression.topk(named, density=0.02, dense_below=100, timeout_s=20.0)
    inner = torch.optim.SGD([p], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=made)
    armed: list[bool] = []

    def look(*_: object) -> None:
        if armed:
            armed.clear()
            raise Spike

    optimizer.register_step_post_hook(look)
    due = torch.zeros(NUMEL)
    for step in range(6):
        optimizer.zero_grad()
        gradient = whole(step)
        due += hvd.allreduce(gradient, name=f"spike.{step}")
        (p * gradient).sum().backward()
        if step in (2, 4):
            armed.append(True)
            with pytest.raises(Spike):
                optimizer.step()
        else:
            optimizer.step()
    left = hvd.allreduce(made.state_dict()["residual"]["spike"], name="spike.left")
    assert torch.equal(left - p.detach(), due)
    assert made.stats().skipped_steps == 0
    made.close()


def forgets_before_the_names_are_known(folder: str) -> None:
    """The compression takes its names from Horovod's optimizer, and has a checkpoint before."""

    def made(named: Any) -> tuple[Any, Any, list[nn.Parameter]]:
        parameters = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(2)]
        pairs = list(zip(("forgets.body", "forgets.head"), parameters, strict=True))
        made = Compression.topk(
            pairs if named else None, density=0.02, dense_below=100, timeout_s=20.0
        )
        inner = torch.optim.SGD(parameters, lr=1.0)
        return (
            made,
            lambda: hvd.DistributedOptimizer(inner, named_parameters=pairs, compression=made),
            parameters,
        )

    def train(optimizer: Any, parameters: list[nn.Parameter], by: float) -> None:
        optimizer.zero_grad()
        torch.stack([(p * whole(i) * by).sum() for i, p in enumerate(parameters)]).sum().backward()
        optimizer.step()

    compression, wrapped, parameters = made(True)
    train(wrapped(), parameters, 1.0)
    compression.save_checkpoint(folder)
    compression.close()
    del compression, wrapped
    gc.collect()
    compression, wrapped, parameters = made(False)
    compression.load_checkpoint(folder)
    assert compression.forget(["forgets.head"]) > 0
    train(wrapped(), parameters, 0.0)
    assert parameters[0].any()
    assert not parameters[1].any()
    compression.close()


def freezes_a_sparse_embedding() -> None:
    """In mid-training, where warnings are errors: Horovod then gives it dense zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(100, 32, sparse=True), nn.Linear(32, 40))
    named = [(f"embedding.{name}", p) for name, p in model.named_parameters()]
    compression = Compression.topk(named, density=0.5, **ALL)
    compression.exchange_embeddings(named)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named, compression=compression
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for step in range(4):
            before = weights(model[0])
            model[0].requires_grad_(step < 2)
            wrapped.zero_grad()
            model(torch.arange(12).view(3, 4) + step + hvd.rank()).square().mean().backward()
            wrapped.step()
            assert torch.equal(before, weights(model[0])) == (step >= 2)
    compression.close()


SCENARIOS: dict[str, tuple[Any, ...]] = {
    "freezes an embedding": (freezes_a_sparse_embedding,),
    "a GAN by dgc_sgd": (switches_a_discriminator_off, "dgc_sgd"),
    "a GAN by sparse_adamw": (switches_a_discriminator_off, "sparse_adamw"),
    "all names": (gives_each_optimizer_all_names,),
    "another's names": (names_what_another_optimizer_has,),
    "float16 turns dense": (goes_on_densely_in_half_precision, torch.float16),
    "bfloat16 turns dense": (goes_on_densely_in_half_precision, torch.bfloat16),
    "taken off": (takes_the_compression_off,),
    "an earlier state": (broadcasts_an_earlier_state_of_adamw,),
    "a hook raises": (catches_what_its_step_hook_raises,),
}


@pytest.mark.parametrize("name", SCENARIOS)
@with_ranks(World(2))
def test_it_means_the_same(ranks: Ranks, name: str) -> None:
    ranks.run(*SCENARIOS[name])


@with_ranks(World(2))
def test_what_is_forgotten_first(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(forgets_before_the_names_are_known, str(tmp_path / "checkpoint"))
