"""Scripts as people write them, for both doors: one text.

Gradients are even whole numbers and the rate is 1, so that books balance to the last bit: what was
applied and what waits is what the framework alone applies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_sparse import Compression

NUMEL = 3000
DENSITY = 0.02
NUMBERS = itertools.count()

Script = Callable[[Any], None]
SCRIPTS: dict[str, Script] = {}


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


class Training:
    """Two tensors for the engine and a small one, by a framework alone or with a compression.

    Args:
        density: None: without a compression.
        arguments: More of the compression's.
    """

    rank: int
    size: int
    inner: Any
    """torch's optimizer."""
    optimizer: Any
    """What the script steps."""

    def __init__(self, density: float | None, **arguments: Any) -> None:
        self.prefix = f"scripts.{next(NUMBERS)}"  # a name is for one training
        self.parameters = [nn.Parameter(torch.zeros(n)) for n in (NUMEL, 2 * NUMEL, 10)]
        self.named = [(f"{self.prefix}.{i}", p) for i, p in enumerate(self.parameters)]
        self.compression: Any = None
        if density is not None:
            options = {"dense_below": 100, "bucket_numel": 2 * NUMEL, "timeout_s": 20.0}
            self.compression = Compression.topk(
                self.named, density=density, **{**options, **arguments}
            )
        self.at = 0

    def backward(self, among: tuple[int, ...] = (0, 1, 2), scale: float = 1.0) -> None:
        """New gradients, which differ between ranks, of some of the tensors."""
        generator = torch.Generator().manual_seed(1000 * self.at + self.rank)
        self.at += 1
        drawn = [
            2.0 * scale * torch.randint(-9, 10, p.shape, generator=generator)
            for p in self.parameters
        ]
        self.loss({i: drawn[i] for i in among}).backward()  # type: ignore[no-untyped-call]

    def loss(self, gradients: dict[int, Tensor]) -> Tensor:
        """That of which these are the gradients."""
        return torch.stack([(self.parameters[i] * g).sum() for i, g in gradients.items()]).sum()

    def reduce(self) -> None:
        """From here on `p.grad` is the mean over the ranks."""
        raise NotImplementedError

    def apply(self, closure: Callable[[], float] | None = None) -> None:
        """A step with gradients that are reduced already, or are by a closure."""
        raise NotImplementedError

    def mean(self, tensor: Tensor) -> Tensor:
        """Over the ranks."""
        raise NotImplementedError

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.zero()
            self.backward()
            self.optimizer.step()

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None

    def moved(self) -> Tensor:
        """What the weights moved by, and what waits on all ranks, in units of the average."""
        moved = torch.cat([p.detach().flatten() for p in self.parameters]).double()
        if self.compression is not None:
            held = self.compression.state_dict()["residual"]
            residuals = [held.get(name, torch.zeros(p.shape)).flatten() for name, p in self.named]
            moved -= self.mean(torch.cat(residuals).double())
        return moved

    def close(self) -> None:
        if self.compression is not None:
            self.compression.close()


def balance(script: Script, make: Callable[[float | None], Training]) -> None:
    """A script ends with the same books, at a low density and bit for bit at density 1."""
    torch.manual_seed(0)
    ends = []
    for density in (None, DENSITY, 1.0):
        training = make(density)
        script(training)
        assert torch.cat([p.detach() for p in training.parameters]).any()
        ends.append(training.moved())
        if density == DENSITY:
            assert training.compression.stats().totals.nnz_selected
        training.close()
    rounding = 0.0 if training.size == 2 else 1e-4  # thirds are no binary numbers
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0.0, atol=rounding)


@script
def accumulate_reduced(training: Training) -> None:
    """Two passes, reduced one by one, before each step."""
    for _ in range(3):
        training.zero()
        for _ in range(2):
            training.backward()
            training.reduce()
        training.apply()


@script
def accumulate_reduced_in_a_closure(training: Training) -> None:
    def closure() -> float:
        training.zero()
        for _ in range(2):
            training.backward()
            training.reduce()
        return 0.0

    for _ in range(3):
        training.apply(closure)


@script
def throw_away_in_a_closure(training: Training) -> None:
    """As a guard in a framework does that passes all of a step in a closure."""
    for is_dropped in (False, True, False, True):

        def closure(is_dropped: bool = is_dropped) -> float:
            training.zero()
            training.backward()
            training.reduce()
            if is_dropped:
                training.zero()
            return 0.0

        training.apply(closure)


@script
def throw_away_before_the_first_step(training: Training) -> None:
    for in_place in (False, True):
        training.backward()
        training.reduce()
        for p in training.parameters if in_place else ():
            p.grad.zero_()
        if not in_place:
            training.zero()
    training.zero()
    training.step(3)


@script
def throw_away_in_the_middle(training: Training) -> None:
    """As a GAN discards what the other loss has left."""
    training.step(2)
    for in_place in (False, True, True):
        training.backward()
        training.reduce()
        for p in training.parameters:
            if in_place:
                p.grad.zero_()
            else:
                p.grad = None
    training.backward()
    training.optimizer.step()
    training.step(2)


@script
def throw_away_one_tensor(training: Training) -> None:
    training.step(2)
    for _ in range(2):
        training.zero()
        training.backward()
        training.reduce()
        training.parameters[0].grad = None
        training.apply()
    training.step(2)


@script
def step_at_rate_0(training: Training) -> None:
    group = training.optimizer.param_groups[0]
    for rate in (0.0, 1.0, 0.0, 0.0, 1.0):
        group["lr"] = rate
        training.step()


@script
def keep_gradients_at_rate_0(training: Training) -> None:
    """The next pass adds to what a step of rate 0 has left."""
    group = training.optimizer.param_groups[0]
    for _ in range(2):
        training.zero()
        for rate in (0.0, 1.0):
            group["lr"] = rate
            training.backward()
            training.optimizer.step()


@script
def look_ahead_of_the_step(training: Training) -> None:
    """As SAM: a first gradient moves the weights, and a second one is applied where they were."""
    training.step(1)
    for _ in range(3):
        training.zero()
        training.backward()
        training.reduce()
        before = [p.detach().clone() for p in training.parameters]
        with torch.no_grad():
            for p in training.parameters:
                p.add_(p.grad)
        training.zero()
        training.backward()
        training.reduce()
        with torch.no_grad():
            for p, old in zip(training.parameters, before, strict=True):
                p.copy_(old)
        training.apply()


@script
def step_by_the_optimizer_inside(training: Training) -> None:
    """What is wrapped shares its groups, and may be stepped by a method of its own."""
    inner = torch.optim.SGD(training.parameters, lr=1.0)
    for _ in range(4):
        training.zero()
        training.backward()
        training.reduce()
        inner.step()


@script
def leave_tensors_out(training: Training) -> None:
    """Other tensors on each rank, as with heads that a batch does not use."""
    for step in range(5):
        training.zero()
        training.backward(among=((0, 2), (1,), (0, 1, 2))[(step + training.rank) % 3])
        training.optimizer.step()


@script
def zero_before_the_step(training: Training) -> None:
    training.step(2)
    for _ in range(2):
        training.zero()
        training.backward()
        training.reduce()
        training.parameters[0].grad.zero_()
        training.parameters[1].grad.mul_(1.0)
        training.apply()
    training.step(2)


@script
def freeze_and_synchronize(training: Training) -> None:
    training.parameters[1].requires_grad_(False)
    for _ in range(2):
        training.zero()
        training.backward(among=(0, 2))
        training.reduce()
        training.apply()
    training.parameters[1].requires_grad_(True)
    training.step(2)


@script
def keep_gradients_and_set_them_to_zero(training: Training) -> None:
    for zeros in (1, 2, 1, 1):
        training.backward()
        training.optimizer.step()
        for _ in range(zeros):
            training.inner.zero_grad(set_to_none=False)


@script
def freeze_in_mid_run(training: Training) -> None:
    for step in range(6):
        frozen = step in (2, 3)
        training.parameters[1].requires_grad_(not frozen)
        training.zero()
        training.backward(among=(0, 2) if frozen else (0, 1, 2))
        training.optimizer.step()


@script
def zero_between_synchronize_and_step(training: Training) -> None:
    training.step(2)
    for set_to_none in (True, False):
        training.backward()
        training.reduce()
        training.inner.zero_grad(set_to_none=set_to_none)
        training.apply()
    training.step(2)


@script
def replace_gradients(training: Training) -> None:
    """A new object in `p.grad`, before and after the reduction."""
    for _ in range(3):
        training.zero()
        training.backward()
        training.reduce()
        for p in training.parameters:
            p.grad = 2.0 * p.grad
        training.zero()
        training.backward()
        training.optimizer.step()


@script
def fail_in_a_step(training: Training) -> None:
    """An error of the optimizer's, after which the script drops the gradients and goes on."""
    training.step(1)
    for set_to_none in (False, True, False):
        training.backward()
        training.optimizer.param_groups[0]["params"].append(None)
        with pytest.raises(AttributeError):
            training.optimizer.step()
        training.optimizer.param_groups[0]["params"].pop()
        training.inner.zero_grad(set_to_none=set_to_none)
        training.backward()
        training.reduce()
        training.apply()
        training.zero()


@script
def schedule_from_the_second_step_on(training: Training) -> None:
    """Schedulers replace `optimizer.step`, before it is bound or later."""
    first = torch.optim.lr_scheduler.ConstantLR(training.optimizer, 1.0)
    training.step(2)
    second = torch.optim.lr_scheduler.StepLR(training.optimizer, 2, gamma=1.0)
    for _ in range(4):
        training.step(1)
        first.step()
        second.step()


@script
def use_a_parameter_in_two_optimizers(training: Training) -> None:
    """One of Horovod's, and one of this process alone, which decays the weights."""
    decay = torch.optim.SGD(training.parameters[:2], lr=1.0)
    for step in range(4):
        training.zero()
        training.backward()
        training.optimizer.step()
        for p in training.parameters[:2]:
            p.grad = torch.full_like(p, 2.0 * step)
        decay.step()


@script
def swap_averaged_weights(training: Training) -> None:
    """Weights are exchanged for an evaluation, in which the optimizer's own state is loaded."""
    for _ in range(3):
        training.step(2)
        kept = [p.detach().clone() for p in training.parameters]
        with torch.no_grad():
            for p in training.parameters:
                p.zero_()
            for p, old in zip(training.parameters, kept, strict=True):
                p.copy_(old)
        training.optimizer.load_state_dict(training.optimizer.state_dict())


@script
def update_by_hand(training: Training) -> None:
    for _ in range(4):
        training.backward()
        training.reduce()
        with torch.no_grad():
            for p in training.parameters:
                p.sub_(p.grad)
                p.grad.zero_()
        if training.compression is not None:
            training.compression.applied()


@script
def copy_gradients(training: Training) -> None:
    """Between `synchronize` and `step`, between two passes, or kept aside for a while."""
    for step in range(4):
        training.zero()
        for _ in range(2):
            training.backward()
            training.reduce()
            copies = [p.grad.detach().clone() for p in training.parameters]
            if step % 2:
                training.zero()
            for p, gradient in zip(training.parameters, copies, strict=True):
                p.grad = gradient
        training.apply()


@script
def zero_the_data(training: Training) -> None:
    """As scripts did before torch 1.0; torch does not count it as a change."""
    training.step(2)
    for steps in (False, True, False):
        training.zero()
        training.backward()
        training.reduce()
        for p in training.parameters[: 1 if steps else 3]:
            p.grad.data.zero_()
        if steps:
            training.apply()
    training.backward()
    training.optimizer.step()


@script
def zero_in_a_hook_of_the_step(training: Training) -> None:
    """Hooks of an optimizer run before those of all optimizers."""
    for set_to_none in (True, False):
        hook = training.optimizer.register_step_post_hook(
            lambda *_, is_none=set_to_none: training.inner.zero_grad(set_to_none=is_none)
        )
        for synchronizes in (True, False):
            training.backward()
            if synchronizes:
                training.reduce()
                training.apply()
            else:
                training.optimizer.step()
        hook.remove()


def zero_what_was_reduced_of_one_layer(training: Training) -> None:
    """The other, in the same bucket, has sent nothing: its gradient was not dropped."""
    training.step()
    for _ in range(4):
        training.zero()
        generator = torch.Generator().manual_seed(1000 * training.at + training.rank)
        training.at += 1
        drawn = {0: 2.0, 1: 2000.0}
        gradients = {
            i: scale * torch.randint(1, 9, training.parameters[i].shape, generator=generator)
            for i, scale in drawn.items()
        }
        training.loss(gradients).backward()  # type: ignore[no-untyped-call]
        training.reduce()
        training.parameters[1].grad.zero_()  # type: ignore[union-attr]
        training.apply()


@script
def apply_by_hand_and_load_the_present_state(training: Training) -> None:
    training.step(2)
    training.zero()
    training.backward()
    training.reduce()
    with torch.no_grad():
        for p in training.parameters:
            if p.grad is not None:
                p -= p.grad
    if training.compression is not None:
        training.compression.applied()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.step()
