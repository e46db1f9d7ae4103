"""Momentum is applied once, by whoever is to do it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from hvd_sparse import Compression, ConfigError, MomentumCorrectedSGD, dgc_sgd, sparse_adamw
from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.handover import Handover, left_dense
from hvd_sparse.adapter.refusals import refuse_double_momentum
from hvd_sparse.errors import UnsupportedError
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.methods import METHODS
from hvd_sparse.optim import REDUCED_BY, exponents_of, reducer_of
from tests.ranks import Ranks, World, with_ranks

CORRECTS = SimpleNamespace(corrects_momentum=lambda parameter: True)
"""A door behind which the momentum of its parameters is corrected."""


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_with_and_without_a_compression_it_is_momentum_sgd(
    nesterov: bool, weight_decay: float
) -> None:
    """Fed with gradients that have their momentum in them, or with raw ones."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 20, generator=generator)
    theirs, raw, corrected = (nn.Parameter(w.clone()) for w in weights[:1].expand(3, 20))
    sgd = torch.optim.SGD([theirs], 0.1, 0.9, weight_decay=weight_decay, nesterov=nesterov)
    ours = MomentumCorrectedSGD([raw, corrected], 0.1, 0.9, weight_decay, nesterov)
    REDUCED_BY[corrected] = lambda: CORRECTS
    u = torch.zeros(20)
    for _ in range(5):
        g = torch.randn(20, generator=generator)
        theirs.grad, raw.grad = g.clone(), g.clone()
        u = 0.9 * (u + g) if nesterov else 0.9 * u + g
        corrected.grad = u + g if nesterov else u.clone()
        sgd.step()
        ours.step()
        torch.testing.assert_close(raw.detach(), theirs.detach())
        torch.testing.assert_close(corrected.detach(), theirs.detach())


def test_its_arguments() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    for name, value in (("lr", -1.0), ("momentum", 1.0), ("weight_decay", float("nan"))):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            MomentumCorrectedSGD(parameters, **{name: value})
    optimizer = MomentumCorrectedSGD(parameters)
    assert optimizer.step(lambda: 2.5) == 2.5
    again = MomentumCorrectedSGD(optimizer.param_groups)  # as Horovod makes its subclass
    assert again.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "momentum=0.9.*a second time"),
        (torch.optim.Adam, r"betas=\(0.9, 0.999\).*a second time"),
        (lambda p: MomentumCorrectedSGD(p, momentum=0.8), r"got \(0.9, False\) and \(0.8, False\)"),
        (lambda p: MomentumCorrectedSGD(p, nesterov=True), "nesterov must be the same"),
    ],
)
def test_a_second_momentum_is_refused(make: Any, told: str) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    corrected = {parameters[1]: MemoryOptions(momentum=0.9)}
    with pytest.raises(ConfigError, match=told):
        refuse_double_momentum(make(parameters), corrected)
    refuse_double_momentum(make(parameters), {})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.Adam(p, betas=(0.0, 0.999)),
        lambda p: MomentumCorrectedSGD(p, momentum=0.9),
        lambda p: SimpleNamespace(  # as a ZeroRedundancyOptimizer
            optim=(own := MomentumCorrectedSGD(p, momentum=0.9)), param_groups=own.param_groups
        ),
    ],
)
def test_what_goes_together(make: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    refuse_double_momentum(make(parameters), {parameters[0]: MemoryOptions(momentum=0.9)})


def test_a_sharded_optimizer_hands_nothing_over() -> None:
    """Each rank has a share of the momenta, and none has them all."""
    parameters = [("w", nn.Parameter(torch.zeros(2000)))]
    own = MomentumCorrectedSGD([p for _, p in parameters], momentum=0.9)
    before, after = (METHODS[name](density=0.1).make() for name in ("dgc", "topk"))
    engine: Any = SimpleNamespace(assignment=before)
    assert Handover([own], engine, after, parameters, 0).moves == ["w"]
    sharded = SimpleNamespace(optim=own, param_groups=own.param_groups)
    with pytest.warns(UserWarning, match="sharded: momenta do not change sides"):
        assert not Handover([sharded, own], engine, after, parameters, 0).moves


def test_the_pair() -> None:
    model = nn.Linear(40, 40)
    optimizer, compression = dgc_sgd(
        model.named_parameters(), lr=0.2, momentum=0.8, nesterov=True, weight_decay=1e-4
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.2, 0.8, True)
    expected = Compression.dgc(momentum=0.8, nesterov=True).method
    assert compression.method.description == expected.description
    assert reducer_of(model.weight) is None  # before there is a plan


def by_the_wrapped_optimizer(kind: str) -> None:
    """Scripts may step what Horovod has wrapped: it has the parameters, and states of its own."""
    weights = [nn.Parameter(torch.ones(40, 50)) for _ in range(2)]
    named = [(f"wrapped.{kind}", weights[0])]
    if kind == "sgd":
        inner, compression = dgc_sgd(named, lr=0.1, density=1.0)
        reference: Any = torch.optim.SGD(weights[1:], lr=0.1, momentum=0.9)
    else:
        inner, compression = sparse_adamw(named, lr=0.1, density=1.0)
        reference = torch.optim.AdamW(weights[1:], lr=0.1, betas=(0.0, 0.999))
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=compression)
    for step in range(6):
        factors = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(step))
        for each, parts in ((optimizer, factors[hvd.rank()]), (reference, factors.mean(0))):
            each.zero_grad()
            (each.param_groups[0]["params"][0] * parts).sum().backward()
        optimizer.synchronize()
        inner.step()
        reference.step()
        torch.testing.assert_close(*weights)
    if kind == "adamw":
        assert exponents_of(weights[0]) is not None
    compression.close()


def two_of_one_model() -> None:
    """Each is given the names of the whole model; in mid-training rank 0's states go to all."""
    shapes = (40, 50), (30, 70), (10,)
    parameters, twins = ([nn.Parameter(torch.ones(s)) for s in shapes] for _ in range(2))
    named = [(f"both.{i}", p) for i, p in enumerate(parameters)]
    parts = parameters[:1], parameters[1:]
    compressions = [dgc_sgd(named, lr=0.1, density=1.0, dense_below=100)[1] for _ in parts]
    optimizers = [
        hvd.DistributedOptimizer(
            MomentumCorrectedSGD(part, lr=0.1),
            named_parameters=[(n, p) for n, p in named if any(p is q for q in part)],
            compression=compression,
        )
        for part, compression in zip(parts, compressions, strict=True)
    ]
    reference = torch.optim.SGD(twins, lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3 and hvd.rank() == 1:  # a newcomer, that has none of the dense momenta
            optimizers[1].state[parameters[2]].clear()
        if step == 3:
            for optimizer in optimizers:
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for each, of in ((twins, reference), (parameters, None)):
            for i, p in enumerate(each):
                draw = torch.Generator().manual_seed(10 * step + i)
                factors = torch.randn(2, *p.shape, generator=draw)
                p.grad = None
                (p * (factors.mean(0) if of else factors[hvd.rank()])).sum().backward()
        for each in (*optimizers, reference):
            each.step()
        for p, q in zip(parameters, twins, strict=True):
            torch.testing.assert_close(p, q)
    for compression in compressions:
        compression.close()


def goes_on_without_gradients() -> None:
    """No rank has a loss in some steps, as where a batch has no positive sample."""
    found = []
    for makes_plain in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(3000))
        named = [(f"idle.{makes_plain}", parameter)]
        inner: Any = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        options: dict[str, Any] = {}
        if not makes_plain:
            inner, compression = dgc_sgd(named, lr=0.1, momentum=0.9, density=1.0)
            options = {"compression": compression}
        optimizer: Any = hvd.DistributedOptimizer(inner, named_parameters=named, **options)
        for step in range(9):
            optimizer.zero_grad()
            if step % 3 != 1:
                (parameter * (1.0 + hvd.rank())).square().sum().backward()
            elif step == 4 and not makes_plain:
                compression.load_state_dict(compression.state_dict())  # there is no plan then
            elif step == 7 and not makes_plain:
                compression.reassign(compression.method)
            optimizer.step()
        found.append(parameter.detach().clone())
    torch.testing.assert_close(*found)


def momentum_twice() -> None:
    """Of two reductions before a step, the second one would begin with the first one's momentum."""
    for again, passes in (("reduced", 1), ("step", 1), ("applied", 1), ("applied", 2)):
        parameter = nn.Parameter(torch.randn(3000))
        named = [(f"twice.{again}.{passes}", parameter)]
        inner, compression = dgc_sgd(named, lr=0.1, momentum=0.9, density=0.1)
        optimizer: Any = hvd.DistributedOptimizer(
            *(inner, named, compression), backward_passes_per_step=passes
        )
        for set_to_none in (True, False):
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()
            for _ in range(passes):
                parameter.square().sum().backward()
            optimizer.synchronize()
            if again != "reduced":
                with optimizer.skip_synchronize():
                    optimizer.step()
        torch.autograd.grad(parameter.square().sum(), parameter)  # which adds to nothing
        for _ in range(passes if again == "applied" else 0):
            parameter.square().sum().backward()
        call = parameter.square().sum().backward if again == "reduced" else optimizer.step
        with pytest.raises(UnsupportedError, match=f"gradient of '{named[0][0]}', in which the"):
            call()
        compression.close()


def synchronizes_twice() -> None:
    """Horovod only warns of a `step` that reduces again what waits to be applied."""
    found = []
    for twice in (False, True):
        parameter = nn.Parameter(torch.ones(3000))
        named = [(f"synchronized.{twice}", parameter)]
        inner, compression = dgc_sgd(named, lr=0.1, momentum=0.9, density=0.1)
        optimizer: Any = hvd.DistributedOptimizer(
            inner, named_parameters=named, compression=compression
        )
        for step in range(4):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + hvd.rank())
            (parameter * torch.randn(3000, generator=draw)).sum().backward()
            if twice:
                optimizer.synchronize()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        compression.close()
        found.append(parameter.detach().clone())
    assert torch.equal(*found)


@with_ranks(World(2))
def test_a_step_may_reduce_again_what_waits(ranks: Ranks) -> None:
    ranks.run(synchronizes_twice)


@with_ranks(World(2))
def test_momentum_goes_on_without_gradients(ranks: Ranks) -> None:
    ranks.run(goes_on_without_gradients)


@with_ranks(World(2))
def test_momentum_is_not_given_twice(ranks: Ranks) -> None:
    ranks.run(momentum_twice)


@with_ranks(World(2))
def test_two_optimizers_of_one_model(ranks: Ranks) -> None:
    ranks.run(two_of_one_model)


@with_ranks(World(2))
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_wrapped_optimizer_may_step(ranks: Ranks, kind: str) -> None:
    ranks.run(by_the_wrapped_optimizer, kind)


def test_what_is_left_dense_is_named_with_the_reason() -> None:
    named = [(n, nn.Parameter(torch.zeros(numel))) for n, numel in (("big", 2000), ("small", 10))]
    named.append(("double", nn.Parameter(torch.zeros(2000, dtype=torch.float64))))
    method = Compression.topk().method
    assert left_dense(Parameters(named), method, 1024) == {
        "of type torch.float64": ["double"],
        "under dense_below=1024": ["small"],
    }
    rules = [{"match": {"name": "big"}, "compress": "auto", "compressor": "topk"}]
    planner = Compression.from_policy({"version": 1, "rules": rules}).method
    found = left_dense(Parameters(named), planner, 0)
    assert found == {"of type torch.float64": ["double"], "by the policy": ["small"]}
