"""What an optimizer and its loss scaler did with a reduction."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from hvd_sparse.adapter.binding import Entry, any_of, any_of_each, told
from hvd_sparse.adapter.fate import Fates, _is_zero
from hvd_sparse.errors import ConfigError
from tests.devices import on_every_device


class Listened(torch.optim.SGD):
    """With what Horovod's optimizers know of a reduction."""

    _synchronized, _should_synchronize, _handles = False, True, ()


def step(scaler: torch.amp.GradScaler, parameter: nn.Parameter, optimizer: Listened) -> None:
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("where", [None, 0, 4097, 99_999])
@pytest.mark.parametrize("shape", [(100_000,), (250, 400)])
def test_one_element_is_seen_wherever_it_is(shape: tuple[int, ...], where: int | None) -> None:
    gradient = torch.zeros(shape)
    if where is not None:
        gradient.view(-1)[where] = 1e-30
    assert bool(any_of(gradient)) is (where is not None)
    assert bool(any_of(gradient.t() if gradient.dim() == 2 else gradient)) is (where is not None)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_many_tensors_are_looked_at_together(dtype: torch.dtype, device: torch.device) -> None:
    least = torch.finfo(dtype).smallest_normal / 8  # its square is 0
    values = [0.0, -0.0, 1.0, least, float("nan"), float("inf")]
    for sizes in ((3,), (0,), (40, 50)):
        gradients = [torch.zeros(sizes, dtype=dtype, device=device) for _ in values]
        for gradient, value in zip(gradients, values, strict=True):
            gradient.view(-1)[-1:] = value
        expected = [bool(sizes[0]) and value != 0.0 for value in values]
        assert told(any_of_each(gradients)) == expected
        mixed = [*gradients, torch.ones(2, device=device).to_sparse()]
        assert told(any_of_each(mixed)) == [*expected, True]


@pytest.mark.parametrize("keep", [False, True])
def test_residuals_follow_a_new_loss_scaler(keep: bool) -> None:
    """As one that is made in each epoch; the earlier one may be there still."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Listened([parameter], lr=0.1)
    fate = Fates({})
    optimizer.register_step_pre_hook(fate.before_step)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    factors = []
    for _ in range(3):
        step(scaler, parameter, optimizer)
        factors.append(fate.rescaling())
    assert factors == [1.0, 2.0, 1.0]
    assert fate.unit == 128.0
    kept = scaler if keep else None
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=2)
    gc.collect()
    with pytest.warns(UserWarning, match="loss scale of 128, but a new scaler began with 32"):
        step(scaler, parameter, optimizer)
    assert fate.rescaling() == 0.25
    step(scaler, parameter, optimizer)
    assert fate.rescaling() == 2.0
    assert fate.unit == 64.0
    assert (kept is not None) is keep


def test_a_scale_that_underflows_divides_nothing() -> None:
    fates = Fates({})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fates.scaler, fates.unit = weakref.ref(scaler), 8.0
    scaler._init_scale = 0.0  # as after as many skipped steps as a float has halves
    assert [fates.rescaling() for _ in range(2)] == [1.0, 1.0]
    scaler._init_scale = 16.0
    assert fates.rescaling() == 2.0


def test_a_step_without_the_scaler_is_refused() -> None:
    """Before anything is applied: its gradients are in other units than the residuals."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Listened([parameter], lr=0.1)
    entry = Entry(parameter, "p", "p")
    fate = Fates({id(parameter): entry})
    optimizer.register_step_pre_hook(fate.before_step)
    step(torch.amp.GradScaler("cpu", init_scale=64.0), parameter, optimizer)
    optimizer.step()  # of nothing that a compression gave back, as Horovod's broadcast of states
    before = parameter.detach().clone()
    fate.give([entry])
    with pytest.raises(ConfigError, match="loss scale of 64, but no GradScaler called"):
        optimizer.step()
    assert torch.equal(parameter, before)
    fate.unit, fate.scaler = 1.0, None  # as `rescale` does
    optimizer.step()


def test_a_scaler_may_have_a_step_of_its_own() -> None:
    class Own(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
            self.unscale_(optimizer)
            optimizer.step()

    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Listened([parameter], lr=0.1)
    fate = Fates({})
    optimizer.register_step_pre_hook(fate.before_step)
    step(Own("cpu", init_scale=64.0), parameter, optimizer)
    assert fate.unit == 64.0


def test_a_scaler_that_comes_late_is_told() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Listened([parameter], lr=0.1)
    fate = Fates({})
    fate.applied()
    optimizer.register_step_pre_hook(fate.before_step)
    with pytest.warns(UserWarning, match="loss scale of 1, but a new scaler began with 64"):
        step(torch.amp.GradScaler("cpu", init_scale=64.0), parameter, optimizer)


@pytest.mark.parametrize(
    ("rate", "is_zero"),
    [
        *((0, True), (0.0, True), (torch.zeros(()), True), (None, False), (0.1, False)),
        *((torch.zeros(3), False), (lambda: 0.0, False)),
    ],
)
def test_rates_of_any_kind(rate: object, is_zero: bool) -> None:
    assert _is_zero(rate) is is_zero
