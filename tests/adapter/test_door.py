"""Whatever plain Horovod trains means the same with a compression: scripts as people write them.

Those that know nothing of Horovod stand in `tests/scripts.py`.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

import hvd_sparse
from hvd_sparse import Compression, ConfigError, MomentumCorrectedSGD, UnsupportedError
from tests import scripts
from tests.launch import horovodrun
from tests.lean import bring_compiler
from tests.ranks import Ranks, World, with_ranks
from tests.scripts import DENSITY, NUMEL, Script

SCRIPTS = dict(scripts.SCRIPTS)


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


class Training(scripts.Training):
    """By Horovod."""

    def __init__(
        self,
        density: float | None,
        make: Callable[..., Any] = torch.optim.SGD,
        is_grouped: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(density, **arguments)
        self.rank, self.size = hvd.rank(), hvd.size()
        self.is_grouped = is_grouped
        self.wrap(make(self.parameters, lr=1.0))

    def wrap(self, inner: Any) -> None:
        self.inner = inner
        self.optimizer = hvd.DistributedOptimizer(
            inner,
            named_parameters=self.named,
            compression=self.compression or hvd.Compression.none,
            groups=[self.parameters[:2]] if self.is_grouped else None,
        )

    @override
    def reduce(self) -> None:
        self.optimizer.synchronize()

    @override
    def apply(self, closure: Callable[[], float] | None = None) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step(closure)

    @override
    def mean(self, tensor: Tensor) -> Tensor:
        return hvd.allreduce(tensor, op=hvd.Average, name=f"{self.prefix}.mean")


@script
def synchronize_with_nothing_new(training: Training) -> None:
    training.step(2)
    training.optimizer.synchronize()
    training.optimizer.synchronize()
    training.step(2)


@script
def give_frozen_ones_gradients(training: Training) -> None:
    """As evolution strategies do, whose parameters require none."""
    first = training.parameters[0].requires_grad_(False)
    for step in range(3):
        training.zero()
        training.backward(among=(1, 2))
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        first.grad = 2.0 * torch.randint(-9, 10, first.shape, generator=generator)
        training.optimizer.step()


@script
def step_another_optimizer_with_a_closure(training: Training) -> None:
    """As what Horovod has wrapped, which its `synchronize` knows nothing of."""
    other = torch.optim.SGD(training.parameters, lr=1.0)

    def closure() -> float:
        training.zero()
        training.backward()
        training.reduce()
        return 0.0

    for _ in range(3):
        other.step(closure)


@script
def replace_the_optimizer_after_a_drop(training: Training) -> None:
    """The old one is gone, and its last gradients, too; the compression goes on."""
    training.step(2)
    training.zero()
    training.backward()
    training.reduce()
    training.zero()
    training.optimizer = None
    gc.collect()
    training.wrap(torch.optim.SGD(training.parameters, lr=1.0))
    training.step(2)


@script
def come_without_a_backward_pass(training: Training) -> None:
    """One rank has an empty batch, in the first step and later; sums come in between."""
    for step in range(4):
        training.zero()
        if hvd.rank() != step % 2:
            training.backward()
        else:
            training.at += 1
        hvd.allreduce(torch.ones(1), name=f"{training.prefix}.loss.{step}")
        training.optimizer.step()


@script
def sum_inside_backward(training: Training) -> None:
    """As SyncBatchNorm does: between two gradients of one backward pass."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            hvd.allreduce(torch.ones(1), name=f"{training.prefix}.inside")
            return gradient

    for step in range(3):
        training.zero()
        first, second, _ = training.parameters
        loss = (second * 2.0).sum()
        if hvd.rank() == 0 or step % 2:
            loss = loss + (Summed.apply(first) * 4.0).sum()
        else:
            hvd.allreduce(torch.ones(1), name=f"{training.prefix}.inside")
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()


@script
def broadcast_after_a_skipped_step(training: Training) -> None:
    training.step(1)
    training.zero()
    training.backward()
    training.optimizer.synchronize()  # a loss scaler would skip the step that follows
    hvd.broadcast_optimizer_state(training.optimizer, 0)
    training.step(2)


@script
def drop_what_was_synchronized_twice(training: Training) -> None:
    training.step(2)
    training.zero()
    training.backward()
    training.optimizer.synchronize()
    training.optimizer.synchronize()
    training.step(2)


@script
def synchronize_first_without_a_backward_pass(training: Training) -> None:
    """One rank's first batch is empty, and gradients are reduced one by one before a step."""
    for step in range(2):
        training.zero()
        for turn in range(2):
            if hvd.rank() != 0 or step or turn:
                training.backward()
            else:
                training.at += 1
            training.optimizer.synchronize()
        hvd.allreduce(torch.ones(1), name=f"{training.prefix}.between.{step}")
        with training.optimizer.skip_synchronize():
            training.optimizer.step()


@script
def end_an_epoch_with_fewer_passes(training: Training) -> None:
    """Two passes for each step, but one for the last step of an epoch."""
    training.optimizer.set_backward_passes_per_step(2)
    for passes in (2, 1, 2, 2, 1):
        training.optimizer.zero_grad()
        for _ in range(passes):
            training.backward()
        training.optimizer.step()


@script
def give_gradients_by_hand(training: Training) -> None:
    """As `torch.func.grad` does: no backward pass brings them, in some steps equal ones."""
    for step in range(4):
        generator = torch.Generator().manual_seed(9 * step + (hvd.rank() if step % 2 else 0))
        for p in training.parameters:
            p.grad = 2.0 * torch.randint(-9, 10, p.shape, generator=generator)
        training.optimizer.step()


@script
def write_gradients_by_address(training: Training) -> None:
    """As a CUDA graph does that has captured a backward pass: torch sees nothing of it."""
    for p in training.parameters:
        p.grad = torch.zeros_like(p)
    places = [p.grad.data_ptr() for p in training.parameters]
    for step in range(4):
        for p, place in zip(training.parameters, places, strict=True):
            gradient = torch.full(p.shape, 2.0 * (step + hvd.rank()))
            ctypes.memmove(place, gradient.data_ptr(), gradient.nbytes)
        training.optimizer.step()


@script
def write_gradients_by_numpy(training: Training) -> None:
    """In memory of NumPy's, which torch knows nothing of."""
    arrays = [np.zeros(p.shape, np.float32) for p in training.parameters]
    for p, array in zip(training.parameters, arrays, strict=True):
        p.grad = torch.from_numpy(array)
    for step in range(4):
        for array in arrays:
            array[...] = 2.0 * (step + hvd.rank())
        training.optimizer.step()


@script
def attach_gradients_now_and_then(training: Training) -> None:
    """Parts of one vector, zeroed as a whole; in between, gradients of torch's own."""
    flat = torch.zeros(sum(p.numel() for p in training.parameters))
    parts = [each.data for each in flat.split([p.numel() for p in training.parameters])]
    for _ in range(3):
        for p, part in zip(training.parameters, parts, strict=True):
            p.grad = part
        flat.zero_()
        training.backward()
        training.optimizer.step()
        training.step()


@script
def infer_gradients(training: Training) -> None:
    """Made by hand where torch tracks nothing, as evolution strategies do."""
    for step in range(3):
        with torch.inference_mode():
            for p in training.parameters:
                p.grad = torch.full(p.shape, 2.0 * (step + hvd.rank()))
            training.optimizer.step(lambda: 0.0)  # a closure that only has the loss


@script
def initialize_again_on_one_rank(training: Training) -> None:
    """As a helper for rank 0 alone does: Horovod takes it for nothing."""
    for _ in range(3):
        training.step()
        if hvd.rank() == 0:
            hvd.init()


@script
def checkpoint_activations(training: Training) -> None:
    """A backward pass inside a backward pass."""
    for _ in range(3):
        training.zero()
        with torch.autograd.detect_anomaly(check_nan=False):
            x = torch.full((NUMEL,), 2.0 + 2 * hvd.rank(), requires_grad=True)
            y = checkpoint(lambda x: training.parameters[0] * x, x, use_reentrant=True)
            (y.sum() + (training.parameters[1] * 4.0).sum()).backward()
        training.optimizer.step()


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


@script
def penalize_gradients(training: Training) -> None:
    """A gradient of a gradient; then a hook that changes each as soon as it is there."""
    hook = training.parameters[1].register_post_accumulate_grad_hook(double)
    for _ in range(3):
        training.zero()
        x = torch.full((NUMEL,), 2.0 + hvd.rank(), requires_grad=True)
        value = (training.parameters[0] * x * x).sum() + training.parameters[1].sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        (value + slope.sum()).backward()
        training.optimizer.step()
    hook.remove()


@script
def pass_back_twice(training: Training) -> None:
    """One graph, reduced after each pass; and one tensor's gradient alone."""
    first, second, third = training.parameters
    for step in range(3):
        training.zero()
        loss = (first * 2.0 * (step + hvd.rank())).sum() + second.sum() * 2.0
        loss.backward(retain_graph=True)
        training.optimizer.synchronize()
        (third * 2.0).sum().backward(inputs=[third])
        loss.backward()
        training.optimizer.step()


@script
def broadcast_in_mid_run(training: Training) -> None:
    for _ in range(3):
        training.step()
        hvd.broadcast_parameters(dict(training.named), root_rank=0)
        hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)


@script
def reach_gradients_by_another_name(training: Training) -> None:
    """In a buffer of the script's own, which it sets to zero, or by a list of their data."""
    sizes = [p.numel() for p in training.parameters]
    for is_data in (False, True):
        flat = torch.zeros(sum(sizes))
        for p, part in zip(training.parameters, flat.split(sizes), strict=True):
            p.grad = part.data if is_data else part
        for _ in range(2):
            flat.zero_()
            training.backward()
            before = [p.grad.data for p in training.parameters]
            training.optimizer.synchronize()
            assert all(map(torch.equal, before, (p.grad for p in training.parameters)))
            assert torch.equal(torch.cat(before), flat)
            with training.optimizer.skip_synchronize():
                training.optimizer.step()
    training.step()
    training.zero()
    training.backward()
    before = [p.grad.detach() for p in training.parameters]
    training.optimizer.synchronize()
    assert all(map(torch.equal, before, (p.grad for p in training.parameters)))
    with training.optimizer.skip_synchronize():
        training.optimizer.step()


@script
def concatenate_parameters(training: Training) -> None:
    """Their gradients are parts of one, which count each other's changes."""
    for step in range(4):
        gradient = torch.arange(-3.0, 3.0).repeat(sum(p.numel() for p in training.parameters))
        gradient = gradient.roll(step + hvd.rank())[: gradient.numel() // 6]
        (torch.cat(training.parameters) * gradient).sum().backward()
        training.optimizer.step()
        training.inner.zero_grad(set_to_none=step % 2 == 1)


@script
def fail_in_a_backward_pass(training: Training) -> None:
    """On both ranks or on one: what has come is reduced, and dropped or applied."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            raise ValueError("failed")

    first, second, _ = training.parameters
    for failing in ((0,), (0, 1), (1,), (0,)):
        for retries in (True, False):
            training.zero()
            loss = (second * 4.0).sum() + (first * 2.0 * (1 + hvd.rank())).sum()
            if hvd.rank() in failing:
                loss = loss + Failing.apply(first).sum()
                with pytest.raises(ValueError, match="failed"):
                    loss.backward()
            else:
                loss.backward()
            if retries:
                training.optimizer.synchronize()
                training.zero()
                training.backward()
            training.optimizer.step()


@script
def hold_a_method(training: Training) -> None:
    """Taken before there is a door, as trainers with callbacks do."""
    synchronize = training.optimizer.synchronize
    for _ in range(3):
        training.zero()
        training.backward()
        synchronize()
        training.apply()


@script
def step_in_inference_mode(training: Training) -> None:
    for _ in range(3):
        training.zero()
        training.backward()
        with torch.inference_mode():
            training.optimizer.step()


@script
def pass_back_in_threads(training: Training) -> None:
    """A pass for each tensor, at the same time, also in the first step."""
    together = threading.Barrier(3)

    def wait(_: Tensor) -> None:
        together.wait(20.0)

    for p in training.parameters:
        p.register_hook(wait)
    for step in range(4):
        training.zero()
        losses = [(p * 2.0 * (step + hvd.rank())).sum() for p in training.parameters]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        training.optimizer.step()


@script
def give_up_a_loss_scaler(training: Training) -> None:
    """While its object lives: it has no say in what `rescale` has told."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        training.zero()
        scaler.scale(torch.ones(()))
        training.backward(scale=64.0)
        training.reduce()
        with training.optimizer.skip_synchronize():
            scaler.step(training.optimizer)
        scaler.update()
    if training.compression is not None:
        training.compression.rescale(1 / 64)
    training.step(2)
    assert scaler.get_scale() == 64.0


def balance(name: str) -> None:
    scripts.balance(SCRIPTS[name], Training)


@with_ranks(World(2, "mpi"), World(3))
@pytest.mark.parametrize("name", SCRIPTS)
def test_books_balance(ranks: Ranks, name: str) -> None:
    ranks.run(balance, name)


def balance_in_one_bucket() -> None:
    make = partial(Training, bucket_numel=4 * scripts.NUMEL)
    scripts.balance(scripts.zero_what_was_reduced_of_one_layer, make)


@with_ranks(World(2))
def test_what_was_not_sent_is_not_dropped_with_the_rest(ranks: Ranks) -> None:
    ranks.run(balance_in_one_bucket)


# -- strides ---------------------------------------------------------------------------------------


def train_strided(fused: bool, dense_below: int) -> None:
    """Parameters in another order of memory, and optimizers that read gradients in that order."""
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        weights = []
        for form in ("contiguous", "strided"):
            torch.manual_seed(1)
            conv = nn.Conv2d(3, 8, 3)
            table = nn.Parameter(torch.randn(30, 20))
            if form == "strided":
                conv = conv.to(memory_format=torch.channels_last)
                table = nn.Parameter(table.detach().t().contiguous().t())
            named = [(f"strided.{form}.{n}", p) for n, p in conv.named_parameters()]
            named.append((f"strided.{form}.table", table))
            compression = Compression.topk(named, density=1.0, dense_below=dense_below)
            optimizer: Any = hvd.DistributedOptimizer(
                make([p for _, p in named], lr=0.1, fused=fused),
                named_parameters=named,
                compression=compression,
            )
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + hvd.rank())
                optimizer.zero_grad()
                x = torch.randn(2, 3, 6, 6, generator=generator)
                loss = conv(x).square().sum() + (table @ torch.randn(20, generator=generator)).sum()
                loss.backward()
                optimizer.step()
            assert all(p.grad is not None and p.grad.stride() == p.stride() for _, p in named)
            weights.append([p.detach().contiguous() for _, p in named])
            compression.close()
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@with_ranks(World(2))
@pytest.mark.parametrize("dense_below", [0, 10**6])
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_lie_in_memory_as_their_parameters(
    ranks: Ranks, fused: bool, dense_below: int
) -> None:
    ranks.run(train_strided, fused, dense_below)


# -- what is refused, followed or told -------------------------------------------------------------


@contextmanager
def told(*patterns: str) -> Iterator[None]:
    """Exactly these warnings of this package's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(w.message) for w in caught if "hvd_sparse" in str(w.message)]
    assert len(messages) == len(patterns), messages
    for message, pattern in zip(messages, patterns, strict=True):
        assert pattern in message, message


def go_back_to_the_beginning(with_states: bool) -> None:
    """A learning-rate range test: train until weights are huge, then load the beginning."""
    ends = []
    for density in (None, DENSITY):
        training = Training(density, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
        model = nn.ParameterList(training.parameters)
        start = copy.deepcopy([model.state_dict(), training.optimizer.state_dict()])
        state = training.compression.state_dict() if density and with_states else None
        for group in training.optimizer.param_groups:
            group["lr"] = 1e20
        training.step(4)
        model.load_state_dict(start[0])
        training.optimizer.load_state_dict(start[1])
        training.at = 0
        training.zero()
        if state is not None:
            training.compression.load_state_dict(state)
        with told(
            *(["residuals, since optimizer.load_state_dict()"] if density and not state else [])
        ):
            training.step(1)
        training.optimizer.param_groups[0]["momentum"] = 0.0
        ends.append(training.moved())
        training.close()
    assert torch.equal(*ends)


def change_momentum() -> None:
    """Followed where it is the optimizer's alone, refused where the compression has one, too."""
    ends = []
    for density in (None, 1.0):
        training = Training(density, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.5))
        for momentum in (0.5, 0.0, 0.25):
            training.optimizer.param_groups[0]["momentum"] = momentum
            training.step()
        ends.append(training.moved())
        training.close()
    assert torch.equal(*ends)
    training = Training(DENSITY, momentum=0.9)
    training.step(2)
    training.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match="would apply momentum a second time"):
        training.step()
    training.close()
    own = partial(MomentumCorrectedSGD, momentum=0.9)
    training = Training(DENSITY, lambda p, lr: own(p, lr=lr), momentum=0.9)
    training.step(2)
    training.optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(ConfigError, match="nesterov must be the same"):
        training.step()
    training.close()


def change_gradients_too_early() -> None:
    """Clipping, or a loss scaler's step, while gradients are on their way; also in a first step."""
    refused = (UnsupportedError, HorovodInternalError)  # whichever rank comes first tells the other
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for steps in (0, 1):
        for unscales in (True, False):
            training = Training(DENSITY)
            training.step(steps)
            hvd.barrier()  # no rank is still in that step when another one fails
            training.zero()
            with pytest.raises(refused, match="was changed after backward"):  # noqa: PT012
                training.backward()
                if unscales:
                    scaler.scale(torch.ones(()))
                    scaler.step(training.optimizer)
                nn.utils.clip_grad_norm_(training.parameters, 1.0)
                training.optimizer.step()
            training.close()


def change_a_dense_gradient_too_early() -> None:
    """Of a tensor that Horovod reduces, alone."""
    training = Training(DENSITY)
    training.step(3)  # in the second all wait for the ranks' weights to be compared
    hvd.barrier()
    training.zero()
    with pytest.raises((UnsupportedError, HorovodInternalError), match="was changed after"):  # noqa: PT012
        training.backward()
        dense = training.parameters[2].grad
        assert dense is not None
        dense.mul_(2.0)
        training.optimizer.step()
    training.close()


def let_horovod_count_its_own_change() -> None:
    """On a GPU without NCCL it copies a dense gradient back from the host, as soon as it can."""
    allreduce = hvd.allreduce_async_

    def counted(tensor: Tensor, **options: Any) -> int:
        handle: int = allreduce(tensor, **options)
        torch.autograd.graph.increment_version(tensor)
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "allreduce_async_", counted)
        training = Training(DENSITY)
        training.step(3)
        training.close()


def lose_gradients() -> None:
    training = Training(DENSITY)
    training.step()
    training.zero()
    training.backward()
    training.zero()
    with pytest.raises(ConfigError, match=r"the gradient of 'scripts\.\d+\.\d' is gone: zero_grad"):
        training.optimizer.step()
    training.close()


def name_those_of_another_optimizer() -> None:
    """Two optimizers over one model, each with the names of all its parameters."""
    ends = []
    for density in (None, 1.0):
        torch.manual_seed(3)
        model = nn.Linear(40, 30)
        named = [(f"both.{density}.{name}", p) for name, p in model.named_parameters()]
        optimizers: list[Any] = []
        for p in model.parameters():
            compression: Any = hvd.Compression.none
            if density is not None:
                compression = Compression.topk(named, density=density, dense_below=0)
            sgd = torch.optim.SGD([p], lr=0.1)
            optimizers.append(
                hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compression)
            )
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.full((4, 40), 1.0 + hvd.rank())).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def name_in_another_order() -> None:
    """Also embeddings; the last rank names its parameters backwards."""
    torch.manual_seed(2)
    tables = [nn.Embedding(20, 3, sparse=True) for _ in range(2)]
    layer = nn.Linear(6, 40)
    named = [(f"order.{i}", table.weight) for i, table in enumerate(tables)]
    named += [(f"order.{name}", p) for name, p in layer.named_parameters()]
    mine = named if hvd.rank() == 0 else named[::-1]
    compression = Compression.topk(mine, density=1.0, dense_below=0, timeout_s=20.0)
    compression.exchange_embeddings(mine)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.1),
        named_parameters=mine,
        compression=compression,
    )
    with told():
        for step in range(3):
            optimizer.zero_grad()
            rows = torch.arange(5) + 2 * step + hvd.rank()
            layer(torch.cat([t(rows) for t in tables], 1)).square().sum().backward()
            optimizer.step()
    for name, p in named:
        everywhere = hvd.allgather(p.detach()[None], name=f"{name}.all")
        assert all(torch.equal(p, other) for other in everywhere)
    compression.close()


def name_twice() -> None:
    """Tied weights under both of their names."""
    weights = []
    for momentum in (True, False):
        torch.manual_seed(3)
        model = nn.Linear(40, 40)
        names = [(f"{n}.{momentum}", model.weight) for n in ("tied.a", "tied.b")]
        names.append((f"tied.bias.{momentum}", model.bias))
        if momentum:
            optimizer, compression = hvd_sparse.dgc_sgd(
                names, lr=0.1, momentum=0.9, density=1.0, dense_below=0
            )
        else:
            compression = Compression.topk(names, density=1.0, dense_below=0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=names, compression=compression
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            model(model(x)).square().mean().backward()
            optimizer.step()
        assert compression.forget([f"tied.a.{momentum}"]) == 0.0
        weights.append(model.weight.detach())
        compression.close()
    torch.testing.assert_close(*weights)


def tell_another_scale() -> None:
    """A loss scaler of the script's own, which doubles its scale at each step."""
    ends = []
    for density in (None, DENSITY):
        training = Training(density)
        scale = 1.0
        for _ in range(5):
            scale *= 2.0
            if density is not None:
                training.compression.rescale(2.0)
            training.zero()
            training.backward(scale=scale)
            training.optimizer.synchronize()
            for p in training.parameters:
                p.grad.div_(scale)
            with training.optimizer.skip_synchronize():
                training.optimizer.step()
        if density is not None:
            training.compression.rescale(1.0 / scale)
        ends.append(training.moved())
        training.close()
    assert torch.equal(*ends)


def warm_up_from_rate_0() -> None:
    """Momentum of a step of rate 0 counts, in the optimizer or in the compression."""
    ends = []
    for compressed in (False, True):
        parameter = nn.Parameter(torch.zeros(NUMEL))
        named = [(f"rate.{compressed}", parameter)]
        inner, compression = hvd_sparse.dgc_sgd(named, lr=0.0, momentum=0.5, density=1.0)
        optimizer: Any = hvd.DistributedOptimizer(
            inner,
            named_parameters=named,
            compression=compression if compressed else hvd.Compression.none,
        )
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.0 if step < 2 else 1.0
            optimizer.zero_grad()
            (parameter * (2.0 + 4.0 * hvd.rank())).sum().backward()
            optimizer.step()
        ends.append(parameter.detach())
        compression.close()
    assert torch.equal(*ends)


def leave_a_group_out() -> None:
    """A group that no rank uses at first, and ranks whose first gradients differ."""
    for first in ((2,), (hvd.rank(),)):
        ends = []
        for density in (None, 1.0):
            training = Training(density, is_grouped=True)
            for among in (first, (0, 1, 2)):
                training.zero()
                training.backward(among=among)
                training.optimizer.step()
            ends.append(training.moved())
            training.close()
        assert torch.equal(*ends)


def use_an_embedding_late() -> None:
    """No rank uses the second table in the first step."""
    for exchanges in (False, True):
        ends = []
        for compressed in (False, True):
            torch.manual_seed(6)
            tables = nn.ModuleList(nn.Embedding(50, 8, sparse=True) for _ in range(2))
            model = nn.ModuleList([tables, nn.Linear(8, 1)])
            label = f"late.{exchanges}.{compressed}"
            named = [(f"{label}.{n}", p) for n, p in model.named_parameters()]
            compression: Any = hvd.Compression.none
            if compressed:
                compression = Compression.topk(named, density=1.0, dense_below=0, timeout_s=20.0)
                if exchanges:
                    compression.exchange_embeddings(named)
            optimizer: Any = hvd.DistributedOptimizer(
                torch.optim.SGD([p for _, p in named], lr=0.1),
                named_parameters=named,
                compression=compression,
            )
            for step in range(4):
                for _, p in named:
                    p.grad = None
                model[1](tables[step % 2](torch.arange(5) + hvd.rank())).sum().backward()
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            ends.append(torch.cat([p.detach().flatten() for _, p in named]))
            if compressed:
                compression.close()
        torch.testing.assert_close(*ends)


def restore_an_optimizer_with_state() -> None:
    """`TorchState` loads the compression's state before the optimizer's."""
    training = Training(DENSITY, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.5))
    state = hvd.elastic.TorchState(
        nn.ParameterList(training.parameters), training.optimizer, compression=training.compression
    )
    state.sync()
    training.step(3)
    state.commit()
    kept = training.compression.state_dict()["residual"]
    training.step(1)
    with told():
        state.restore()
        state.sync()
        found = training.compression.state_dict()["residual"]
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], kept[name]) and kept[name].any() for name in kept)
        training.step(1)
    training.close()


def look_at_gradients_from_elsewhere() -> None:
    """By a view of DLPack's, and in memory that other processes have, too."""
    for is_shared in (False, True):
        training = Training(DENSITY)
        for p in training.parameters:
            p.grad = torch.zeros_like(p).share_memory_() if is_shared else torch.zeros_like(p)
        addresses = [p.grad.data_ptr() for p in training.parameters]
        views = [] if is_shared else [np.from_dlpack(p.grad) for p in training.parameters]
        for _ in range(3):
            training.inner.zero_grad(set_to_none=False)
            training.backward()
            training.optimizer.step()
            assert [p.grad.data_ptr() for p in training.parameters] == addresses
            for view, p in zip(views, training.parameters, strict=False):
                assert np.array_equal(view, p.grad.numpy())
        pickle.dumps(training.parameters[0])
        training.close()


def update_by_data() -> None:
    training = Training(DENSITY)
    with told("no optimizer.step() applied the reduced gradients"):
        for _ in range(5):
            training.zero()
            training.backward()
            training.optimizer.synchronize()
            for p in training.parameters:
                p.data.sub_(p.grad.data)
    training.close()


def pass_a_compression_on() -> None:
    """One that a script's own compressor calls does not see whose gradient it is."""

    class Own:
        compress = staticmethod(Compression.topk(density=DENSITY).compress)
        decompress = staticmethod(hvd.Compression.none.decompress)

    p = nn.Parameter(torch.zeros(NUMEL))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), named_parameters=[("passed.on", p)], compression=Own
    )
    with told("compress() was called by another than"):
        p.sum().backward()
        optimizer.step()
    assert torch.equal(p.detach(), torch.full((NUMEL,), -1.0))


def collect_an_earlier_training_in_a_step() -> None:
    """Python collects what is gone at any time, also while torch goes through its hooks."""
    gone: list[Training] = []

    def collect(*_: object) -> None:
        gone.clear()
        gc.collect()

    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        earlier = Training(DENSITY)
        earlier.step()
        earlier.close()
        hook = register(collect)
        training = Training(DENSITY)
        training.step()
        gone.append(earlier)
        del earlier
        training.step()
        hook.remove()
        training.close()


def let_a_tensor_wait() -> None:
    """Nothing of one tensor is among the largest: its reduced gradients are zeros, and count."""
    for passes, drops in ((1, ()), (2, ()), (1, (1, 2))):
        ends = []
        for density in (None, DENSITY):
            training = Training(density, bucket_numel=3 * NUMEL)
            for step in range(4):
                training.inner.zero_grad(set_to_none=False)
                for _ in range(passes):
                    for i, scale in ((0, 1.0), (1, 100.0)):
                        training.backward(among=(i,), scale=scale)
                    training.optimizer.synchronize()
                    nn.utils.clip_grad_norm_(training.parameters, 1e9)
                if step in drops:
                    training.inner.zero_grad(set_to_none=False)
                    if training.compression is not None:
                        training.compression.state_dict()
                    continue
                with training.optimizer.skip_synchronize():
                    training.optimizer.step()
            if density is not None and not drops:
                assert not training.parameters[0].any()
            ends.append(training.moved())
            training.close()
        assert torch.equal(*ends), (passes, drops)


def copy_with_residuals() -> None:
    training = Training(DENSITY)
    with told():
        pickle.dumps(training.compression)
    training.step(1)
    with told("a copy of a compression has none of its residuals"):
        copy.deepcopy(training.compression)
    training.close()


def step_without_a_backward_pass_beside_a_busy_rank() -> None:
    """It waits for the step's pulse, which is no wait for what its peers do not have."""
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    compression = Compression.topk(
        model.named_parameters(), density=0.1, dense_below=0, timeout_s=1.0
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    for step in range(4):  # in the second one weights are compared
        optimizer.zero_grad()
        if step in (1, 2) and hvd.rank() == 0:
            time.sleep(3.5)  # a validation
        if step not in (1, 2) or hvd.rank() != 1:
            model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
    compression.close()


@with_ranks(World(3))
def test_a_busy_rank_is_waited_for_where_another_has_no_batch(ranks: Ranks) -> None:
    ranks.run(step_without_a_backward_pass_beside_a_busy_rank)


def save_alone() -> None:
    """Rank 0 alone, before the first step: the message names the call."""
    training = Training(DENSITY, timeout_s=2.0)
    if hvd.rank() == 0:
        with pytest.raises(HorovodInternalError, match=r"in save_checkpoint\(\) for the other 1"):
            training.compression.save_checkpoint("nowhere")
        print("TOLD")
    hvd.allreduce(torch.ones(1), name="door.after")
    training.close()


@pytest.mark.launches
def test_a_checkpoint_of_one_rank_is_told_by_its_name() -> None:
    assert "TOLD" in horovodrun(2, save_alone, timeout=90).stdout


def compile_the_step() -> None:
    bring_compiler()
    found = []
    for density in (None, 1.0):
        training = Training(density)
        step = torch.compile(lambda optimizer: optimizer.step(), backend="eager")
        for _ in range(3):
            training.zero()
            training.backward()
            step(training.optimizer)
        found.append(training.moved())
        training.close()
    assert torch.equal(*found)


@pytest.mark.launches
def test_a_compiled_step_means_the_same() -> None:
    horovodrun(2, compile_the_step, timeout=90)


FUNCTIONS = (
    change_momentum,
    change_gradients_too_early,
    change_a_dense_gradient_too_early,
    let_horovod_count_its_own_change,
    lose_gradients,
    name_those_of_another_optimizer,
    name_in_another_order,
    name_twice,
    let_a_tensor_wait,
    copy_with_residuals,
    tell_another_scale,
    warm_up_from_rate_0,
    leave_a_group_out,
    use_an_embedding_late,
    restore_an_optimizer_with_state,
    collect_an_earlier_training_in_a_step,
    look_at_gradients_from_elsewhere,
    update_by_data,
    pass_a_compression_on,
)


@with_ranks(World(2))
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_habits(ranks: Ranks, function: Callable[[], None]) -> None:
    ranks.run(function)


def clip_alone() -> None:
    for clip_norm, words in ((1.0, ["clip_norm does not clip"]), (None, [])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Compression.topk(density=DENSITY, clip_norm=clip_norm)
        told = [str(each.message) for each in caught]
        assert len(told) == len(words)
        assert all(word in text for word, text in zip(words, told, strict=True))


@with_ranks(World(1))
def test_one_worker_is_told_that_nothing_is_clipped(ranks: Ranks) -> None:
    ranks.run(clip_alone)


@with_ranks(World(2))
@pytest.mark.parametrize("with_states", [False, True])
def test_residuals_end_with_the_training_that_is_given_up(ranks: Ranks, with_states: bool) -> None:
    ranks.run(go_back_to_the_beginning, with_states)


def test_attributes_cannot_be_set() -> None:
    compression = Compression.topk([("w", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(ConfigError, match="no attribute 'density' to set"):
        compression.density = 0.5


@pytest.mark.parametrize(
    ("named", "pattern"),
    [
        (nn.BatchNorm1d(3).named_buffers(), "'running_mean', which is no parameter"),
        (nn.Linear(3, 3).state_dict().items(), "'weight', which is no parameter"),
        (iter(()), "got none: an iterator is used up"),
    ],
)
def test_what_are_no_parameters(named: Any, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        Compression.topk(named)
