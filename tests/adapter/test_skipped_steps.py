"""A step that a loss scaler skips costs no gradient."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import Tensor, nn

import hvd_sparse
from tests.ranks import Ranks, World, with_ranks
from tools.ledger import Ledger

STEPS = 10
SPOILT = (2, 3, 7)
"""Steps in which one rank, or all of them, bring something that is not finite."""
ON = {2: (0,), 3: (1,), 7: (0, 1, 2)}
"""Ranks that do so, by step."""


class Model(nn.Module):
    """Two tensors for the engine, one that is too small for it, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(3000))
        self.other = nn.Parameter(torch.zeros(40, 50))
        self.bias = nn.Parameter(torch.zeros(30))
        self.table = nn.Embedding(50, 4, sparse=True)
        self.table.weight.data.zero_()


def gradients(step: int, rank: int, model: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randint(-9, 10, p.shape, generator=generator).float()
        for name, p in model.named_parameters()
        if name != "table.weight"
    }


def keep_the_books(place: str, scaled: bool, method: str, arguments: dict[str, Any]) -> None:
    """Train, and compare.

    Args:
        place: The parameter in which something is not finite.
        scaled: Whether a `GradScaler` skips these steps, and changes its scale; otherwise the
            script does.
        method: A constructor of `Compression`.
        arguments: Its arguments.
    """
    model = Model()
    named = list(model.named_parameters())
    compression = getattr(hvd_sparse.Compression, method)(named, **arguments)
    if scaled:  # sparse gradients are not for scalers of the CPU
        model.table.weight.requires_grad_(False)
        named = [(name, p) for name, p in named if name != "table.weight"]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=1.0),
        named_parameters=named,
        compression=compression,
        op=hvd.Sum,
    )
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**6, growth_interval=3)
    table = model.table.weight
    ledger = Ledger((name, p) for name, p in named if p is not table)
    skipped = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        spoils = step in SPOILT and hvd.rank() in ON[step]
        own = gradients(step, hvd.rank(), model)
        loss = torch.zeros(())
        for name, p in model.named_parameters():
            if name in own:
                factor = own[name].clone()
                if spoils and name == place:
                    factor.view(-1)[7] = [float("inf"), float("-inf"), float("nan")][step % 3]
                loss = loss + (p * factor).sum()
        if not scaled:
            rows = torch.arange(5) + 7 * step
            weight = float("nan") if spoils and place == "table.weight" else 1.0
            loss = loss + (model.table(rows % 50) * weight).sum()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        counts = step not in SPOILT
        with optimizer.skip_synchronize():
            if scaled:
                scaler.step(optimizer)
            elif counts:
                optimizer.step()
        scaler.update()
        skipped += not counts
        if counts:
            ledger.feed(own)
    scale = scaler.get_scale() if scaled else 1.0
    assert ledger.lost(compression.state_dict()["residual"], scale) == 0.0
    assert bool(table.isfinite().all())
    assert bool(table.any()) != scaled  # it learns where a scaler does not leave it out
    assert compression.stats().skipped_steps == skipped
    if scaled:
        assert scale != 2.0**6, "the scale was to change"
    compression.close()


@with_ranks(World(3))
@pytest.mark.parametrize(
    ("place", "scaled"),
    [(p, s) for p in ("large", "bias", "other") for s in (True, False)] + [("table.weight", False)],
)
def test_a_skipped_step_costs_no_gradient(ranks: Ranks, place: str, scaled: bool) -> None:
    for method, arguments in (
        ("oktopk", {"density": 0.02}),
        ("dgc", {"density": 0.02, "momentum": 0.0, "bucket_numel": 2000}),
        ("exdyna", {"density": 0.02, "dense_below": 2500}),
    ):
        ranks.run(keep_the_books, place, scaled, method, arguments)


@with_ranks(World(3, "mpi"))
def test_a_skipped_step_costs_no_gradient_under_mpi(ranks: Ranks) -> None:
    ranks.run(keep_the_books, "bias", True, "oktopk", {"density": 0.02})
    ranks.run(keep_the_books, "table.weight", False, "oktopk", {"density": 0.02})
