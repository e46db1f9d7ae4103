"""What Horovod tests of its optimizer: the same calls, and at density 1 the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hvd_sparse import Compression
from tests.ranks import Ranks, World, with_ranks

Wrap = Callable[..., Any]
"""Makes Horovod's optimizer of one of torch's, and of a model, with a compression or without."""

CHECKS: dict[str, Callable[[Wrap], Tensor]] = {}


def check(function: Callable[[Wrap], Tensor]) -> Callable[[Wrap], Tensor]:
    CHECKS[function.__name__] = function
    return function


class Heads(nn.Module):
    """Two outputs, of which a rank may use only one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(30, 10), nn.Linear(10, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.second(F.relu(self.first(x)))
        return one, self.third(F.relu(one))


def torch_optimizers() -> list[type[torch.optim.Optimizer]]:
    """Those that take dense gradients, and step without a closure."""
    found = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    }
    return sorted(found, key=lambda kind: kind.__name__)


def weights(*models: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


@check
def every_optimizer_and_unused_heads(wrap: Wrap) -> Tensor:
    ends = []
    for kind in torch_optimizers():
        for more in ({"momentum": 0.9, "weight_decay": 0.1}, {}):
            torch.manual_seed(0)
            model = Heads()
            options = {k: v for k, v in more.items() if k in signature(kind).parameters}
            optimizer = wrap(kind(model.parameters(), lr=0.02, **options), model)
            for _ in range(2):
                optimizer.zero_grad()
                x = torch.randn(8, 30) + hvd.rank()
                model(x)[hvd.rank() % 2].square().mean().backward()
                optimizer.step()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            ends.append(weights(model))
    return torch.cat(ends)


@check
def gradients_turned_on_and_off(wrap: Wrap) -> Tensor:
    """A GAN, whose optimizers' parameters have the same names."""
    torch.manual_seed(1)
    generator, critic = nn.Conv2d(1, 10, 1), nn.Conv2d(10, 1, 1)
    x = torch.rand(1, 1, 20, 20) + hvd.rank()
    optimizers = [wrap(torch.optim.SGD(m.parameters(), lr=1e-4), m) for m in (generator, critic)]
    for step in range(10):
        for place, model in enumerate((generator, critic)):
            model.requires_grad_(step % 2 == place)
        for optimizer in optimizers:
            optimizer.zero_grad()
        critic(generator(x)).sum().backward()
        optimizers[step % 2].step()
    return weights(generator, critic)


@check
def clipping_between_synchronize_and_step(wrap: Wrap) -> Tensor:
    torch.manual_seed(2)
    model = nn.Linear(5, 5)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for skips in (True, False, True):
        optimizer.zero_grad()
        model(torch.ones(3, 5) + hvd.rank()).square().sum().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if skips:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert len(told) == (not skips)
        assert all("called without optimizer.skip_synchronize" in str(w.message) for w in told)
    return weights(model)


@check
def no_named_parameters(wrap: Wrap) -> Tensor:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 100, 1), nn.Conv2d(100, 1, 1))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1e-6), None)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(1, 1, 30, 30)).sum().backward()
        optimizer.step()
    return weights(model)


@check
def a_frozen_parameter_of_another_type(wrap: Wrap) -> Tensor:
    model = nn.Module()
    model.a = nn.Parameter(torch.tensor([1, 3], dtype=torch.int32), requires_grad=False)
    model.b = nn.Parameter(torch.arange(4.0))
    optimizer = wrap(torch.optim.SGD([model.a, model.b], lr=0.1, momentum=0.9), model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in range(2):
        model.b.grad = None
        (model.b[model.a.long()] * (1.0 + hvd.rank())).sum().backward()
        optimizer.step()
    assert model.a.grad is None
    return model.b.detach()


@check
def nothing_but_a_sparse_embedding(wrap: Wrap) -> Tensor:
    torch.manual_seed(4)
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = wrap(torch.optim.SparseAdam(list(model.parameters()), lr=0.1), None)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]]) - step % 2).sum().backward()
        optimizer.step()
    return weights(model)


@check
def a_synchronize_of_the_scripts_own(wrap: Wrap) -> Tensor:
    """It was put on the optimizer before the first gradient came."""
    torch.manual_seed(3)
    model = nn.Linear(20, 20)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    own, calls = optimizer.synchronize, []

    def synchronize() -> None:
        own()
        calls.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))

    optimizer.synchronize = synchronize
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 20) + step + hvd.rank()).square().sum().backward()
        optimizer.step()
    assert len(calls) == 4
    return weights(model)


@check
def gradients_kept_from_step_to_step(wrap: Wrap) -> Tensor:
    """As optimizers do that compare a gradient with the one before."""
    torch.manual_seed(4)
    model = nn.Linear(20, 20)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    kept: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 20) + step + hvd.rank()).square().mean().backward()
        optimizer.step()
        kept.append(model.weight.grad)
    return torch.cat([weights(model), *(gradient.flatten() for gradient in kept)])


def compare(name: str) -> None:
    made: list[Any] = []

    def plain(inner: Any, model: nn.Module | None, compression: Any = hvd.Compression.none) -> Any:
        options = {} if model is None else {"named_parameters": model.named_parameters()}
        return hvd.DistributedOptimizer(inner, compression=compression, **options)

    def compressed(inner: Any, model: nn.Module | None) -> Any:
        named = None if model is None else model.named_parameters()
        made.append(Compression.topk(named, density=1.0, dense_below=0))
        return plain(inner, model, made[-1])

    expected, found = CHECKS[name](plain), CHECKS[name](compressed)
    for compression in made:
        compression.close()
    assert torch.equal(found, expected), (found - expected).abs().max()


@with_ranks(World(2))
@pytest.mark.parametrize("name", CHECKS)
def test_as_horovod_tests_it(ranks: Ranks, name: str) -> None:
    ranks.run(compare, name)
