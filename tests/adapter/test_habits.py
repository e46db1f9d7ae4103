"""What users do beside a plain training loop, on real ranks."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn

from hvd_sparse import (
    Compression,
    ConfigError,
    PlanError,
    UnsupportedError,
    dgc_sgd,
    sparse_adamw,
)
from tests.plans import AllDense
from tests.ranks import Ranks, World, with_ranks

made = 0


def training(
    frozen: bool = False,
    make: Callable[..., Any] = torch.optim.SGD,
    wide: int = 30,
    **arguments: Any,
) -> tuple[nn.Sequential, Any, Any]:
    """A model, Horovod's optimizer and a compression, which sends everything by default."""
    model = new_model(wide)
    model[1].requires_grad_(not frozen)
    return model, *wrapped(model, make, **arguments)


def new_model(wide: int = 30) -> nn.Sequential:
    global made  # noqa: PLW0603  # each training names its tensors
    made += 1
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, wide), nn.Linear(wide, 40))


def wrapped(
    model: nn.Module, make: Callable[..., Any] = torch.optim.SGD, **arguments: Any
) -> tuple[Any, Any]:
    named = [(f"habits.{made}.{name}", p) for name, p in model.named_parameters()]
    compression = Compression.topk(named, **{"density": 1.0, "dense_below": 0, **arguments})
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.02), named_parameters=named, compression=compression
    )
    return optimizer, compression


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(torch.randn(4, 20, generator=generator).to(dtype)).square().sum()
    return loss


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def assert_alike(model: nn.Module) -> None:
    """All ranks hold the same weights, bit for bit."""
    mine = weights(model)
    everywhere = hvd.allgather(mine[None], name=f"habits.{made}.weights")
    assert all(torch.equal(mine, row) for row in everywhere)


def validate_on_rank_0() -> None:
    """Between steps one rank evaluates; the others wait for it in their next step."""
    model, optimizer, compression = training()
    for _ in range(2):
        train(model, optimizer, 2)
        if hvd.rank() == 0:
            model.eval()
            with torch.no_grad():
                for step in range(5):
                    loss_of(model, step)
            model.train()
    train(model, optimizer, 1)
    assert compression.stats().steps == 5
    assert_alike(model)
    compression.close()


def add_a_group() -> None:
    model, optimizer, compression = training()
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    told = r"does not reduce the gradients of one of shape \(7,\): these .* wrap again"
    with pytest.raises(UnsupportedError, match=told):
        train(model, optimizer, 1)
    compression.close()


def thaw_a_layer() -> None:
    """Frozen when it was wrapped: Horovod has no hook in it."""
    model, optimizer, compression = training(frozen=True)
    train(model, optimizer, 2)
    model[1].requires_grad_(True)
    told = rf"the gradients of 'habits.{made}.1.weight', 'habits.{made}.1.bias': these"
    with pytest.raises(UnsupportedError, match=told):
        train(model, optimizer, 1)
    compression.close()


def wrap_again() -> None:
    """As the message says: the first one dropped, and another compression; here with a thaw."""
    model, optimizer, compression = training(frozen=True)
    train(model, optimizer, 2)
    compression.close()
    before = weights(model[1])
    model[1].requires_grad_(True)
    del optimizer, compression
    gc.collect()
    optimizer, compression = wrapped(model)
    train(model, optimizer, 2)
    assert not torch.equal(weights(model[1]), before)
    assert_alike(model)
    assert compression.stats().steps == 2
    compression.close()


def step_with_a_closure() -> None:
    model, optimizer, compression = training()
    plain, reference = training()[:2]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with pytest.raises(UnsupportedError, match=r"optimizer.synchronize\(\) at the end of the clos"):
        optimizer.step(closure)
    compression.close()

    model, optimizer, compression = training()

    def waiting() -> Tensor:
        loss = closure()
        optimizer.synchronize()
        return loss

    for _ in range(3):
        with optimizer.skip_synchronize():
            optimizer.step(waiting)
    for _ in range(3):
        train(plain, reference, 1)
    assert torch.equal(weights(model), weights(plain))
    assert compression.stats().steps == 3
    assert compression.stats().skipped_steps == 0
    assert_alike(model)
    compression.close()


def step_by_lbfgs() -> None:
    model, optimizer, compression = training(make=torch.optim.LBFGS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        optimizer.synchronize()
        return loss

    with optimizer.skip_synchronize():
        optimizer.step(closure)  # the compression is bound in it, and does not see its beginning
        with pytest.raises(UnsupportedError, match="its closure more than once, as LBFGS"):
            optimizer.step(closure)
    compression.close()


def change_the_type() -> None:
    """One error with advice, and the advice leads on, also to a type that is always dense."""
    for dtype in (torch.bfloat16, torch.float64):
        model, optimizer, compression = training()
        train(model, optimizer, 2)
        model.to(dtype)
        with pytest.raises(PlanError, match=r"changed from torch.float32.*call compression.reass"):
            train(model, optimizer, 1)
        for handle, _ in optimizer._handles.values():
            hvd.synchronize(handle)
        optimizer.load_state_dict(optimizer.state_dict())  # Horovod forgets what was given up
        compression.reassign(compression.method)
        train(model, optimizer, 3)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert_alike(model)
        compression.close()


def look_at_stats_within_a_step() -> None:
    """A snapshot on one rank, before the step is applied, changes nothing."""
    looked_at, left_alone = (training(density=0.1) for _ in range(2))
    for model, optimizer, compression in (looked_at, left_alone):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            if compression is looked_at[2] and hvd.rank() == 0:
                assert compression.stats().steps == step + 1
            with optimizer.skip_synchronize():
                optimizer.step()
    assert torch.equal(weights(looked_at[0]), weights(left_alone[0]))
    assert looked_at[2].stats().skipped_steps == 0
    assert_alike(looked_at[0])
    for _, _, compression in (looked_at, left_alone):
        compression.close()


def save_within_a_step() -> None:
    """The state is that of before the step; that the step is applied after all, is refused."""
    model, optimizer, compression = training(density=0.1)
    train(model, optimizer, 2)
    before = compression.state_dict()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.synchronize()
    during = compression.state_dict()["residual"]
    assert during.keys() == before["residual"].keys()
    assert any(residual.any() for residual in during.values())
    for name, residual in during.items():
        assert torch.equal(residual, before["residual"][name])
    told = r"state_dict\(\) must be called between steps, got a call after optimizer.synchronize"
    with pytest.raises(ConfigError, match=told), optimizer.skip_synchronize():
        optimizer.step()
    compression.close()


def forget_within_a_step() -> None:
    model, optimizer, compression = training(density=0.1)
    names = [f"habits.{made}.{name}" for name, _ in model.named_parameters()]
    train(model, optimizer, 1)
    loss_of(model, 1).backward()
    with pytest.raises(ConfigError, match=r"forget\(\) must be called between steps"):
        compression.forget(names)
    optimizer.step()
    assert compression.forget(names) > 0
    assert_alike(model)
    compression.close()


def reassign_within_a_step() -> None:
    """It gives the step up; that the step is applied after all, is refused."""
    model, optimizer, compression = training()
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    compression._engine.wait(10.0)  # what is under way yet, would be aborted
    hvd.barrier()
    compression.reassign(compression.method)
    with pytest.raises(ConfigError, match=r"was given up, since close\(\), reassign\(\) or load"):
        optimizer.step()
    compression.close()


def close_within_a_step() -> None:
    """Twice, then steps, and then within one: it gives the step up."""
    model, optimizer, compression = training()
    train(model, optimizer, 2)
    compression.close()
    compression.close()
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    compression._engine.wait(10.0)
    hvd.barrier()
    compression.close()
    with pytest.raises(ConfigError, match=r"was given up, since close\(\), reassign\(\) or load"):
        optimizer.step()
    compression.close()


def looked_at_by_other_threads() -> None:
    """Statistics and states that other threads ask for change nothing, or are refused by name."""
    model, optimizer, compression = training(density=0.1)
    ends, wrong = threading.Event(), []

    def look(call: Callable[[], object]) -> None:
        while not ends.is_set():
            try:
                call()
            except ConfigError as error:
                if "state_dict() must be called between steps" not in str(error):
                    wrong.append(error)
            except Exception as error:
                wrong.append(error)
            time.sleep(1e-4)

    calls = (compression.stats, compression.stats, compression.state_dict)
    threads = [threading.Thread(target=look, args=(call,)) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        train(model, optimizer, 20)
    finally:
        ends.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not wrong, wrong
    assert compression.state_dict()["step"] == 20
    assert compression.stats().skipped_steps == 0
    compression.close()


def without_threads(call: str) -> None:
    """Rank 1 can start no thread, as at a limit: both ranks hear that, and why."""
    model, optimizer, compression = training(bucket_numel=600)
    train(model, optimizer, 2)
    hvd.barrier()  # no rank is still in that step when the other one fails

    def go_on() -> None:
        if call == "save_checkpoint":
            compression.save_checkpoint("/dev/null/none")
        compression.reassign(compression.method)
        train(model, optimizer, 1)

    before = threading.stack_size(1 << 46 if hvd.rank() == 1 else 0)
    try:
        with pytest.raises(HorovodInternalError, match=r"no thread could be started for 'hvd_sp"):
            go_on()
    finally:
        threading.stack_size(before)
    optimizer._handles.clear()
    compression.close()


def reassign_without_a_connection() -> None:
    """What no rank can hand over begins anew, and a warning says so."""
    global made  # noqa: PLW0603
    made += 1
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40))
    named = [(f"habits.{made}.{name}", p) for name, p in model.named_parameters()]
    sgd, compression = dgc_sgd(named, lr=0.02, density=1.0, dense_below=0)
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=named, compression=compression)
    hvd.broadcast_parameters(dict(named), 0)
    train(model, optimizer, 2)
    compression.close()
    with pytest.warns(UserWarning, match=r"momentum of habits.* begins anew: reassign\(\) was"):
        compression.reassign(Compression.topk(density=1.0).method)
    train(model, optimizer, 2)
    compression.close()
    with pytest.warns(UserWarning, match=r"momentum of habits.* begins anew"):
        compression.reassign(Compression.topk(density=1.0, momentum=0.9).method)
    assert not any(optimizer.state.values())  # later it would be added to what is handed over
    train(model, optimizer, 2)
    assert_alike(model)
    compression.close()


def clip_momenta() -> None:
    """The common script clips by what the compression clips, or is refused by name."""
    for kind in ("local", "global"):
        with pytest.warns(
            UserWarning, match="momentum is for 2 tensors; 2 others, which are dense"
        ):
            clip_by_hand(momentum=0.9, momentum_kind=kind, dense_below=100)
    clip_by_hand(refused=False)  # without momentum it is right
    model, optimizer, compression = training(momentum=0.9, clip_norm=0.1)
    train(model, optimizer, 6)
    compression.close()


def clip_by_hand(*, refused: bool = True, **arguments: Any) -> None:
    model, optimizer, compression = training(**arguments)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            if refused and step == 2:
                with pytest.raises(
                    ConfigError, match=r"clipped to a norm of 0.1 .* give it clip_n"
                ):
                    optimizer.step()
                break
            optimizer.step()
    compression.close()


def end_a_momentum() -> None:
    """Under an optimizer that has none it ends with the compression's, and does not come back."""
    model, optimizer, compression = training(density=0.05, momentum=0.9)
    train(model, optimizer, 3)
    assert compression.state_dict()["momentum"]
    before = compression.method
    compression.reassign(AllDense())
    train(model, optimizer, 1)
    compression.reassign(before)
    assert compression.state_dict()["residual"]
    assert not compression.state_dict()["momentum"]
    train(model, optimizer, 1)
    assert_alike(model)
    compression.close()


def synchronize_twice() -> None:
    """Nothing new has come: what stands in the gradients stays there, as the mean of equals."""
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, 2.0)):
        model, optimizer, compression = training(density=0.1)
        optimizer.op = op
        train(model, optimizer, 2)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.synchronize()
        given = [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad.mul_(0.5)  # as clipping does
        with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
            optimizer.step()
        for p, before in zip(model.parameters(), given, strict=True):
            assert torch.equal(p.grad, 0.5 * factor * before)
        optimizer.synchronize()
        train(model, optimizer, 2)
        assert compression.stats().skipped_steps == 0
        assert_alike(model)
        compression.close()


def share_a_backward_pass() -> None:
    """Two optimizers, one compression and one loss: only one of them would be listened to."""
    model, _, compression = training()
    gc.collect()  # the optimizer, whose hooks are the model's
    named = [(f"shared.{name}", p) for name, p in model.named_parameters()]
    compression = Compression.topk(named, density=1.0, dense_below=0)
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.02),
            named_parameters=[(n, p) for n, p in named if n.startswith(f"shared.{place}")],
            compression=compression,
        )
        for place, layer in enumerate(model)
    ]
    with pytest.raises(ConfigError, match="serves one optimizer, but a second"):
        loss_of(model, 0).backward()
    assert len(optimizers) == 2
    compression.close()


def with_an_embedding() -> tuple[nn.Module, nn.Module, Any, list[Any]]:
    """An embedding, a layer, a compression that exchanges both, and their names."""
    global made  # noqa: PLW0603
    made += 1
    embedding, layer = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)
    named = [*embedding.named_parameters(f"habits.{made}.0")]
    named += layer.named_parameters(f"habits.{made}.1")
    compression = Compression.topk(named, density=1.0, dense_below=0)
    compression.exchange_embeddings(named)
    return embedding, layer, compression, named


def distributed(named: list[Any], compression: Any, **arguments: Any) -> Any:
    sgd = torch.optim.SGD([p for _, p in named], lr=0.02)
    return hvd.DistributedOptimizer(
        sgd, named_parameters=named, compression=compression, **arguments
    )


def make_embeddings_dense() -> None:
    embedding, layer, compression, named = with_an_embedding()
    optimizer = distributed(named, compression, sparse_as_dense=True)
    with pytest.raises(ConfigError, match="sparse_as_dense must be False with exchange_embedd"):
        layer(embedding(torch.arange(9))).sum().backward()
    assert not optimizer._synchronized
    compression.close()


def give_embeddings_an_optimizer() -> None:
    """Of Horovod's, whichever steps first; or one of this process alone, as for local tables."""
    for place in (0, 1):
        embedding, layer, compression, named = with_an_embedding()
        optimizers = [
            distributed(named[:1], hvd.Compression.none),
            distributed(named[1:], compression),
        ]
        layer(embedding(torch.arange(9) + hvd.rank())).sum().backward()
        optimizers[place].step()
        optimizers[1 - place].step()
        assert_alike(embedding)
        assert_alike(layer)
        compression.close()
    embedding, layer, compression, named = with_an_embedding()
    optimizer = distributed(named[1:], compression)
    own = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.detach().clone()
    layer(embedding(torch.arange(9))).sum().backward()
    own.step()
    optimizer.step()
    assert bool((embedding.weight[:9] != before[:9]).any(1).all())
    assert torch.equal(embedding.weight[9:], before[9:])
    compression.close()


def exchange_embeddings_late() -> None:
    model, optimizer, compression = training()
    train(model, optimizer, 1)
    with pytest.raises(ConfigError, match="must be called before the first backward pass"):
        compression.exchange_embeddings(model.named_parameters())
    train(model, optimizer, 1)
    compression.close()


def turn_dense_in_half_precision() -> None:
    """Ranks are done with their residuals in other steps, and still give Horovod one type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40)).half()
    for p in model.parameters():
        p.data.zero_()
    global made  # noqa: PLW0603
    made += 1
    optimizer, compression = wrapped(model, density=0.05)
    names = [f"habits.{made}.{name}" for name, _ in model.named_parameters()]
    brought = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    sent = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for step in range(12):
        if step == 4:
            compression.reassign(AllDense())
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        most = 64 if step < 4 or hvd.rank() == 0 else 8
        for p, total in zip(model.parameters(), brought, strict=True):
            gradient = torch.randint(-most, most + 1, p.shape, generator=generator).half()
            p.mul(gradient).sum().backward()
            total += gradient
        optimizer.step()
        for p, total in zip(model.parameters(), sent, strict=True):
            total += p.grad.double() * hvd.size()
    held = compression.state_dict()["residual"]
    for name, p_brought, p_sent in zip(names, brought, sent, strict=True):
        left = held[name].double() if name in held else torch.zeros_like(p_brought)
        total = hvd.allreduce(p_brought - left, op=hvd.Sum, name=f"{name}.total")
        torch.testing.assert_close(p_sent, total, rtol=0, atol=0.5)  # as Horovod adds float16
    longest = max(float(held[name].abs().max()) for name in names if name in held)
    assert longest > 1.0 if hvd.rank() else longest < 0.1  # what float16 rounds off, waits on
    compression.close()


def train_by_a_pickled_copy() -> None:
    """As `gradient_compression=` of Horovod's Spark estimators: it binds itself on arrival."""
    original = Compression.topk(density=1.0, dense_below=0)
    copy, uncalled = cloudpickle.loads(cloudpickle.dumps((original, Compression.topk)))
    for compression in (copy, uncalled):
        model, plain = (training()[0] for _ in range(2))
        gc.collect()  # their optimizers, which nobody needs here
        named = [(f"habits.{made}.{name}", p) for name, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.02),
            named_parameters=named,
            compression=compression,
        )
        train(model, optimizer, 2)
        assert not torch.equal(weights(model), weights(plain))
        assert_alike(model)
    assert copy.stats().steps == 2
    assert original.stats().steps == 0
    copy.close()


def go_back_after_backward() -> None:
    """As on a spike of the loss: what is under way must not become the next step's."""
    ends = []
    busy = torch.zeros(40_000_000)  # what Horovod reduces before the names of a step
    for is_plain in (False, True):
        model, optimizer, _ = plain() if is_plain else training()
        for step in range(6):
            optimizer.zero_grad()
            time.sleep(2.0 * (step == 3 and hvd.rank() == 0))
            handle = hvd.allreduce_async_(busy, name="habits.busy") if step == 3 else None
            loss_of(model, step).backward()
            if step == 3:
                if is_plain:  # which refuses a name that is still on its way
                    hvd.barrier()
                    time.sleep(0.2)
                optimizer.load_state_dict(optimizer.state_dict())
                for p in model.parameters():
                    p.grad = None
                loss_of(model, 100).backward()
                hvd.synchronize(handle)
            optimizer.step()
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


def go_back_after_a_failure() -> None:
    """As `hvd.elastic` does: Horovod has cleared the handle of what has failed."""
    model, optimizer, compression = training(dense_below=10**9, wide=3000)
    train(model, optimizer, 2)
    loss_of(model, 2).backward()
    (handle, *_) = compression._door._handles
    hvd.synchronize(handle)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2)
    assert_alike(model)


def alternate_dense_and_sparse_gradients() -> None:
    """Of the only tensor that is compressed; what comes after a sparse one is not lost."""
    ends = []
    for is_plain in (False, True):
        torch.manual_seed(0)
        table, layer = nn.Embedding(50, 40), nn.Linear(40, 3)
        model = nn.Sequential(table, layer)
        optimizer, compression = wrapped(model, dense_below=1000)
        if is_plain:
            compression.reassign(AllDense())
        for step in range(6):
            table.sparse = step % 3 == 1
            optimizer.zero_grad()
            model(torch.arange(10) + step + hvd.rank()).square().sum().backward()
            optimizer.step()
        ends.append(weights(model))
        compression.close()
    torch.testing.assert_close(*ends)


def lose_a_group() -> None:
    """Horovod goes on reducing what no optimizer has any more, and nobody zeroes it."""
    model, optimizer, _ = training(density=0.05)
    first = optimizer.param_groups[0]
    train(model, optimizer, 2)
    first["params"] = first["params"][2:]
    with pytest.warns(UserWarning, match=r"has 'habits\.\d+\.0\.weight', nor 1 other tensors"):
        train(model, optimizer, 1)


def cycle_betas() -> None:
    """As OneCycleLR does, in each step: the costs of a momentum are told once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, _ = training(make=torch.optim.Adam, density=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        for _ in range(4):
            train(model, optimizer, 1)
            schedule.step()
    assert sum("has a momentum (betas)" in str(each.message) for each in caught) == 1


def keep_views_of_one_buffer() -> None:
    """The first gradients come by hand, so that Horovod's own `synchronize` begins."""
    ends = []
    for is_plain in (False, True):
        model, optimizer, _ = plain() if is_plain else training()
        flat = torch.zeros(weights(model).numel())
        parameters = list(model.parameters())
        for p, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = view.view_as(p)
        for step in range(3):
            flat.zero_()
            gradients = torch.autograd.grad(loss_of(model, step), parameters)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad.add_(gradient)
            optimizer.step()
            assert flat.any()
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


def plain() -> tuple[nn.Sequential, Any, None]:
    """The same without a compression."""
    model = new_model()
    named = [(f"habits.{made}.plain.{n}", p) for n, p in model.named_parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=0.02)
    return model, hvd.DistributedOptimizer(sgd, named_parameters=named), None


def zero_in_place_where_one_layer_sends(how: str) -> None:
    """The head comes first in each pass and alone sends; what is dropped of the others is gone."""
    ends = []
    for density in (0.01, None):
        global made  # noqa: PLW0603
        made += 1
        parameters = [nn.Parameter(torch.zeros(3000)) for _ in range(3)]
        named = [(f"habits.{made}.{i}", p) for i, p in enumerate(parameters)]
        rate = 0.0 if how == "rate 0" else 1.0
        groups = [{"params": parameters[:2], "lr": rate}, {"params": parameters[2:], "lr": 1.0}]
        compression: Any = hvd.Compression.none
        if density is not None:
            compression = Compression.topk(named, density=density, dense_below=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(groups), named_parameters=named, compression=compression
        )
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            gradients = [
                2.0 * torch.randint(1, 9, p.shape, generator=generator) for p in parameters
            ]
            sum(
                (p * gradient * scale).sum()
                for p, gradient, scale in zip(parameters, gradients, (1.0, 1.0, 256.0), strict=True)
            ).backward()
            optimizer.synchronize()
            if step % 2 or how == "rate 0":
                with optimizer.skip_synchronize():
                    optimizer.step()
            for p in parameters:
                (p.grad.data if how == "data" else p.grad).zero_()
        moved = torch.cat([p.detach() for p in parameters]).double()
        if density is not None:
            held = compression.state_dict()["residual"]
            waits = torch.cat([held.get(name, torch.zeros(3000)) for name, _ in named]).double()
            moved -= hvd.allreduce(waits, name=f"habits.{made}.waits")
        ends.append(moved)
    assert torch.equal(*ends)


def zero_the_data_where_one_layer_sends() -> None:
    zero_in_place_where_one_layer_sends("data")


def rest_at_rate_0_where_another_layer_sends() -> None:
    zero_in_place_where_one_layer_sends("rate 0")


def freeze_before_the_first_gradient() -> None:
    """Horovod reduces what required a gradient when it was wrapped: so are the names taken."""
    for ranks in ((0,), (0, 1)):
        model = new_model()
        named = [(f"habits.{made}.late.{name}", p) for name, p in model.named_parameters()]
        compression = Compression.topk(density=1.0, dense_below=0)
        optimizer = hvd.DistributedOptimizer(
            *(torch.optim.SGD(model.parameters(), lr=0.02), named, compression)
        )
        for step in range(3):
            model[0].requires_grad_(step > 0 or hvd.rank() not in ranks)
            train(model, optimizer, 1)
        assert len(compression.state_dict()["residual"]) == 4
        assert_alike(model)
        compression.close()


def take_gradients_of_another_type() -> None:
    """Torch lets a parameter of 16 bits have gradients of 32."""
    if not hasattr(Tensor, "grad_dtype"):
        return
    for below in (0, 10_000):
        model, _, _ = training()
        model.to(torch.bfloat16)
        for p in model.parameters():
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]
        optimizer, _ = wrapped(model, dense_below=below)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            for number, p in enumerate(model.parameters()):
                assert p.grad.dtype == torch.float32
                assert p.grad.any()
                mean = hvd.allreduce(p.grad, name=f"habits.{made}.{step}.{number}")
                assert torch.equal(p.grad, mean)
                p.grad = None
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_alike(model)


def go_back_and_broadcast_the_optimizer() -> None:
    """Horovod steps an optimizer without a state with zeros, before it broadcasts it."""
    model, optimizer, compression = training(density=0.05)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 3)
    model.load_state_dict(start)
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.warns(UserWarning, match="went back to another state"):
        train(model, optimizer, 1)
    compression.close()


class Words(nn.Module):
    """Sampled outputs: their sparse gradient is the first one of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(20, 30)
        self.words = nn.Embedding(50, 30, sparse=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[explicit-override]
        return self.body(x) @ self.words(torch.arange(4) + hvd.rank()).T


def begin_with_sparse_gradients_of_two_passes() -> None:
    global made  # noqa: PLW0603
    ends = []
    for is_plain in (True, False):
        made += 1
        model = Words()
        named = [(f"habits.{made}.{name}", p) for name, p in model.named_parameters()]
        compression = Compression.topk(named, density=1.0, dense_below=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.02),
            named_parameters=named,
            compression=hvd.Compression.none if is_plain else compression,
            backward_passes_per_step=2,
        )
        for step in range(3):
            optimizer.zero_grad()
            for part in range(2):
                loss_of(model, 2 * step + part).backward()
            optimizer.step()
        ends.append(weights(model))
        compression.close()
    torch.testing.assert_close(*ends)


def evaluate_with_the_compression_of_a_trainer() -> None:
    """Horovod's optimizer is not the only object with such an attribute."""

    class Trainer:
        def __init__(self, compression: Any) -> None:
            self._compression = compression

        def evaluate(self) -> Tensor:
            for p in [torch.ones(3)]:
                mine = p * hvd.rank()
                mean: Tensor = hvd.allreduce(
                    mine, name=f"habits.{made}.mean", compression=self._compression
                )
            return mean

    model, optimizer, compression = training()
    trainer = Trainer(compression)
    for _ in range(2):
        with pytest.warns(UserWarning, match="its tensor is reduced densely"):
            assert torch.equal(trainer.evaluate(), torch.full((3,), 0.5))
        train(model, optimizer, 1)
    compression.close()


def unscale_before_the_reduction(make: Any) -> None:
    """As in torch's own loop: each rank would add what others have divided, or have not."""
    global made  # noqa: PLW0603
    for by_hand in (False, True):
        made += 1
        model = new_model()
        named = [(f"habits.{made}.{name}", p) for name, p in model.named_parameters()]
        inner, compression = make(named)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(model, 0)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        hvd.barrier()  # the other one has what was sent, too
        optimizer.zero_grad()
        told = (UnsupportedError, HorovodInternalError)  # by this rank, or by the other one
        with pytest.raises(told, match="was changed after backward"):  # noqa: PT012
            scaler.scale(loss_of(model, 1)).backward()
            if by_hand:
                scaler.unscale_(optimizer)
                optimizer.synchronize()
            scaler.step(optimizer)
        compression.close()


def unscale_before_sums_are_clipped() -> None:
    def make(named: Any) -> Any:
        sgd = torch.optim.SGD([p for _, p in named], lr=0.02)
        return sgd, Compression.topk(named, density=0.1, dense_below=0, clip_norm=1.0)

    unscale_before_the_reduction(make)


def unscale_before_adamw() -> None:
    unscale_before_the_reduction(lambda named: sparse_adamw(named, lr=0.01, dense_below=0))


def set_what_a_compression_has() -> None:
    model, optimizer, compression = training()
    train(model, optimizer, 1)
    for name in ("method", "observer", "density"):
        with pytest.raises(ConfigError, match="has no attribute"):
            setattr(compression, name, None)
    compression.reassign(Compression.topk(density=0.5))
    assert "0.5" in compression.method.description
    compression.close()


HABITS = (
    unscale_before_sums_are_clipped,
    unscale_before_adamw,
    set_what_a_compression_has,
    go_back_and_broadcast_the_optimizer,
    begin_with_sparse_gradients_of_two_passes,
    evaluate_with_the_compression_of_a_trainer,
    go_back_after_backward,
    go_back_after_a_failure,
    alternate_dense_and_sparse_gradients,
    lose_a_group,
    cycle_betas,
    keep_views_of_one_buffer,
    zero_the_data_where_one_layer_sends,
    rest_at_rate_0_where_another_layer_sends,
    freeze_before_the_first_gradient,
    take_gradients_of_another_type,
    validate_on_rank_0,
    add_a_group,
    thaw_a_layer,
    wrap_again,
    step_with_a_closure,
    step_by_lbfgs,
    change_the_type,
    look_at_stats_within_a_step,
    save_within_a_step,
    forget_within_a_step,
    reassign_within_a_step,
    close_within_a_step,
    looked_at_by_other_threads,
    reassign_without_a_connection,
    clip_momenta,
    end_a_momentum,
    synchronize_twice,
    share_a_backward_pass,
    make_embeddings_dense,
    give_embeddings_an_optimizer,
    exchange_embeddings_late,
    turn_dense_in_half_precision,
    train_by_a_pickled_copy,
)


@with_ranks(World(2))
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_a_habit_works_or_is_refused_by_name(ranks: Ranks, habit: Callable[[], None]) -> None:
    ranks.run(habit)


@with_ranks(World(2))
@pytest.mark.parametrize("call", ["save_checkpoint", "reassign"])
def test_a_rank_that_can_start_no_thread_says_so(ranks: Ranks, call: str) -> None:
    ranks.run(without_threads, call)
