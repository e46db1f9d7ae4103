"""Momentum is applied once, by whoever is to do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_sparse import Compression, ConfigError, MomentumCorrectedSGD, dgc_sgd
from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.handover import left_dense
from hvd_sparse.adapter.refusals import refuse_double_momentum
from hvd_sparse.memories import MemoryOptions


class Corrects:
    """A compression that corrects the momentum of some parameters."""

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = {id(p) for p in parameters}

    def corrects_momentum(self, parameter: Tensor) -> bool:
        return id(parameter) in self.parameters


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
    vars(ours)["_compression"] = Corrects(corrected)
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
    ],
)
def test_what_goes_together(make: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    refuse_double_momentum(make(parameters), {parameters[0]: MemoryOptions(momentum=0.9)})


def test_the_pair() -> None:
    model = nn.Linear(40, 40)
    optimizer, compression = dgc_sgd(
        model.named_parameters(), lr=0.2, momentum=0.8, nesterov=True, weight_decay=1e-4
    )
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.2, 0.8, True)
    expected = Compression.dgc(momentum=0.8, nesterov=True).method
    assert compression.method.description == expected.description
    assert not compression.corrects_momentum(model.weight)  # before there is a plan


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
