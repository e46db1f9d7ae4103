"""Under DDP, too, what is delivered and what waits is what plain DDP delivers, in whole numbers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_sparse
from tests.ddp.training import NEVER, SHAPES, Books
from tests.plans import AllDense
from tests.ranks import Ranks, World, with_ranks

STEPS = 8
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "buckets": {"bucket_cap_mb": 0.01},
}
UNUSED: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "unused, buckets": {"find_unused_parameters": True, "bucket_cap_mb": 0.01},
}


HABITS = ("plain", "accumulates", "skips", "loses one", "zeroes", "keeps", "accumulates reduced")


def keep_books(options: dict[str, Any], **compression: Any) -> None:
    for habit in HABITS:
        if habit in ("keeps", "accumulates reduced") and torch.distributed.get_world_size() != 2:
            continue  # a mean of three is no whole number of the next pass
        if habit != "accumulates" or "static_graph" not in options:  # which DDP itself refuses
            keep_book(habit, options, **compression)


def keep_book(habit: str, options: dict[str, Any], **compression: Any) -> None:
    finds_unused = "find_unused_parameters" in options
    shapes = {**SHAPES, **NEVER} if finds_unused else SHAPES
    books = Books(0.02, shapes, **compression, **options)
    for step in range(STEPS):
        rank = torch.distributed.get_rank()
        without = ["never"]
        if finds_unused and (step % 2 or (rank and step % 4)):
            without.append("sometimes")  # on no rank, or on some
        dropped = step % 3 == 1
        if habit == "accumulates":
            with books.model.no_sync():
                books.backward(*without)
        if habit == "accumulates reduced":
            books.backward(*without)
            for p in books.module.values.values() if dropped else ():
                p.grad = None if p.grad is None else p.grad.clone()
        if habit == "skips" and dropped:
            books.backward(*without, counts=False)
            books.optimizer.zero_grad(set_to_none=step % 2 == 0)
        elif habit == "loses one" and dropped:
            gradients = books.draw(*without)
            books.model(gradients).backward()
            books.module.values["b"].grad = None
            for name in gradients.keys() - {"b"}:
                books.expected[name] += gradients[name]
            books.step()
        elif habit == "keeps" and dropped and step < STEPS - 1:  # the next pass begins with them
            books.backward(*without)
            books.optimizer.step()
            for name, p in books.module.values.items():
                if p.grad is not None:
                    books.expected[name] += p.grad
        else:
            books.backward(*without)
            books.step(set_to_none=habit != "zeroes")
    books.check()


@pytest.mark.parametrize("options", [*PLAIN, *UNUSED])
@with_ranks(World(2, "torchrun"))
def test_nothing_is_lost(ranks: Ranks, options: str) -> None:
    ranks.run(keep_books, {**PLAIN, **UNUSED}[options])


@pytest.mark.parametrize("compressor", ["oktopk", "exdyna", "clt_k"])
@with_ranks(World(2, "torchrun"))
def test_nothing_is_lost_by_other_collectives(ranks: Ranks, compressor: str) -> None:
    ranks.run(partial(keep_books, UNUSED["unused, buckets"], compressor=compressor))


@with_ranks(World(2, "torchrun"))
def test_nothing_is_lost_over_a_wire_that_rounds(ranks: Ranks) -> None:
    ranks.run(partial(keep_books, PLAIN["buckets"], arguments={"wire": "float16+gap"}, unit=131))


@with_ranks(World(3, "torchrun"))
def test_nothing_is_lost_of_three(ranks: Ranks) -> None:
    ranks.run(keep_books, UNUSED["unused, buckets"])


def reassign_in_training() -> None:
    """Gradients stay where they are, and have been made by another plan."""
    books = Books(0.02)
    for step in range(STEPS):
        books.backward()
        books.step(set_to_none=False)
        if step in (2, 5):
            books.compression.reassign(books.compression.method)
    books.check()


@with_ranks(World(2, "torchrun"))
def test_another_plan_finds_gradients_in_place(ranks: Ranks) -> None:
    ranks.run(reassign_in_training)


def hand_momenta_to_two_optimizers() -> None:
    """Each gets those of its own parameters, as one optimizer of all would."""
    ends = []
    for apart in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40))
        model = DistributedDataParallel(module)
        compression = hvd_sparse.Compression.dgc(density=0.05, momentum=0.9, clip_norm=None)
        hvd_sparse.ddp.register(model, compression)
        groups = [list(m.parameters()) for m in module] if apart else [list(module.parameters())]
        optimizers = [hvd_sparse.MomentumCorrectedSGD(g, lr=0.05, momentum=0.9) for g in groups]
        generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
        for step in range(2 * STEPS):
            if step == STEPS:
                compression.reassign(AllDense())
            model.zero_grad()
            model(torch.randn(8, 40, generator=generator)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        for group, optimizer in zip(groups, optimizers, strict=True):
            assert {id(p) for p in optimizer.state} <= {id(p) for p in group}
            optimizer.state_dict()
        ends.append(nn.utils.parameters_to_vector(module.parameters()).detach())
        compression.close()
    assert torch.equal(*ends)


@with_ranks(World(2, "torchrun"))
def test_each_optimizer_gets_its_own_momenta(ranks: Ranks) -> None:
    ranks.run(hand_momenta_to_two_optimizers)


def keep_transposed_book() -> None:
    """Residuals are in the order of a tensor's shape, whatever that of its memory is."""
    books = Books(0.02, transposed=True)
    for _ in range(STEPS):
        books.backward()
        books.step()
    books.check()


@with_ranks(World(2, "torchrun"))
def test_another_order_of_memory(ranks: Ranks) -> None:
    ranks.run(keep_transposed_book)


def share_a_buffer() -> None:
    """Gradients are parts of one buffer, and one is used by no rank in some of the passes."""
    books = Books(0.02, find_unused_parameters=True)
    parameters = list(books.module.values.values())
    flat, end = torch.zeros(sum(p.numel() for p in parameters)), 0
    for p in parameters:
        p.grad, end = flat[end : end + p.numel()].view_as(p), end + p.numel()
    for step in range(STEPS):
        flat.zero_()
        gradients = books.draw(*(["b"] if step % 2 else []))
        if "b" in gradients:  # so much that it is still being sent while nobody uses it
            gradients["b"] *= 16
        books.model(gradients).backward()
        for name, gradient in gradients.items():
            books.expected[name] += gradient
        books.optimizer.step()
    books.check()


@with_ranks(World(2, "torchrun"))
def test_gradients_that_are_parts_of_one(ranks: Ranks) -> None:
    ranks.run(share_a_buffer)


def freeze_in_training() -> None:
    books = Books(0.05, find_unused_parameters=True)
    for step in range(STEPS):
        books.module.values["b"].requires_grad_(step not in (3, 4))
        books.backward()
        books.step()
    books.check()


@with_ranks(World(2, "torchrun"))
def test_parameters_freeze_and_thaw(ranks: Ranks) -> None:
    ranks.run(freeze_in_training)


def one_of_two_optimizers_goes_back(who: str) -> None:
    """It loses what waits for its own tensor; the other one goes on with all of its own."""
    books = Books(0.02, {"a": (40, 50), "b": (40, 50)})
    values = books.module.values
    optimizers = {name: torch.optim.SGD([p], lr=1.0) for name, p in values.items()}
    lost = 0.0
    for step in range(STEPS):
        if step == 3:
            kept = values[who].detach().clone(), optimizers[who].state_dict()
        if step == 6:
            waits = books.compression.state_dict()["residual"][f"values.{who}"]
            lost = float(waits.abs().sum())
            with torch.no_grad():
                values[who].copy_(kept[0])
            optimizers[who].load_state_dict(kept[1])
            books.expected[who] = -values[who].detach().double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells what it drops
            books.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    assert books.compression.stats().dropped_l1 == lost
    books.check()


@pytest.mark.parametrize("who", ["a", "b"])
@with_ranks(World(2, "torchrun"))
def test_what_waits_is_lost_for_one_optimizer_alone(ranks: Ranks, who: str) -> None:
    ranks.run(one_of_two_optimizers_goes_back, who)


def leave_to_another_optimizer(how: str) -> None:
    """What is left of b between its steps is told from what is cleared, though it has sent 0.

    It is "cleared" in each pass, "touched" between (as by a clipping that changes nothing), or
    "given up" for gradients of another loss, while those of a are still there.
    """
    ends = []
    for density in (None, 0.01):
        a, b = nn.Parameter(torch.zeros(64, 40)), nn.Parameter(torch.zeros(64, 64))
        module = nn.Module()
        module.a, module.b = a, b
        module.forward = lambda gradients, of=(a, b): sum(
            (p * g).sum() for p, g in zip(of, gradients, strict=True)
        )
        model = DistributedDataParallel(module)
        compression: Any = None
        if density is not None:
            compression = hvd_sparse.Compression.topk(density=density)
            hvd_sparse.ddp.register(model, compression)
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (a, b)]
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for step in range(40):
            (model if how == "cleared" else optimizers[0]).zero_grad(set_to_none=False)
            large = 1000.0 * torch.randint(1, 9, a.shape, generator=generator)
            small = torch.full(b.shape, 2.0 * (step < 20))
            model([large if step < 20 else 0 * large, small]).backward()
            for p in (a, b) if how == "touched" else ():
                p.grad.mul_(1.0)
            optimizers[0].step()
            if how == "given up":
                optimizers[1].zero_grad(set_to_none=False)
                model([0 * large, -2 * small]).backward()
            if step % 4 == 3 or how == "given up":
                optimizers[1].step()
                optimizers[1].zero_grad(set_to_none=False)
        waits = torch.zeros(64, 64)
        if compression is not None:
            waits = compression.state_dict()["residual"]["b"].clone()
            compression.close()
        torch.distributed.all_reduce(waits)
        ends.append(b.detach() - waits / torch.distributed.get_world_size())
    assert torch.equal(*ends)


@pytest.mark.parametrize("how", ["cleared", "touched", "given up"])
@with_ranks(World(2, "torchrun"))
def test_what_one_optimizer_leaves_is_told_from_what_is_cleared(ranks: Ranks, how: str) -> None:
    ranks.run(leave_to_another_optimizer, how)


def take_over_while_one_rank_keeps_the_old_one() -> None:
    """Units come from the optimizer that was made last, whatever else is alive."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 40))
    model = DistributedDataParallel(module)
    named = list(module.named_parameters())
    optimizer, compression = hvd_sparse.sparse_adamw(
        named, lr=1e-2, density=0.05, dense_steps=2, dense_below=100
    )
    hvd_sparse.ddp.register(model, compression)
    kept = []
    for step in range(30):
        if step == 20:
            kept += [optimizer] if torch.distributed.get_rank() == 0 else []
            optimizer = hvd_sparse.SparseAdamW(module.parameters(), lr=5e-3)
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        optimizer.zero_grad()
        model(torch.randn(16, 32, generator=generator)).square().mean().backward()
        optimizer.step()
        weights = nn.utils.parameters_to_vector(module.parameters()).detach()
        every = [torch.empty_like(weights) for _ in range(2)]
        torch.distributed.all_gather(every, weights)
        assert torch.equal(*every), step
    compression.close()


@with_ranks(World(2, "torchrun"))
def test_a_new_optimizer_has_its_units_on_all_ranks(ranks: Ranks) -> None:
    ranks.run(take_over_while_one_rank_keeps_the_old_one)
