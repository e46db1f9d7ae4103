"""Checkpoints under horovodrun."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse
from hvd_sparse.errors import CheckpointError, ConfigError
from tests.ranks import Ranks, World, with_ranks
from tests.serve import ALL_BUT_RANK_0

SCALE = 2.0**6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(3000))
        self.other = nn.Parameter(torch.zeros(40, 50))


def compressed(model: nn.Module, named: bool = True, **arguments: Any) -> tuple[Any, Any]:
    compression = hvd_sparse.Compression.oktopk(
        model.named_parameters() if named else None, density=0.02
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Sum,
        **arguments,
    )
    return compression, optimizer


def train(model: nn.Module, optimizer: Any, scaler: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        loss = sum(
            (p * torch.randint(-9, 10, p.shape, generator=generator)).sum()
            for p in model.parameters()
        )
        scaler.scale(loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def held(compression: Any) -> dict[str, Any]:
    """The sum of all ranks' residuals, as nested lists, which can be sent to the test."""
    shapes = {"large": (3000,), "other": (40, 50)}
    residual = compression.state_dict()["residual"]
    return {
        name: hvd.allreduce(
            residual.get(name, torch.zeros(shape)), op=hvd.Sum, name=f"checkpoint.held.{name}"
        ).tolist()
        for name, shape in shapes.items()
    }


def save_to(folder: str) -> dict[str, Any]:
    model = Model()
    compression, optimizer = compressed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    compression.save_checkpoint(Path(folder) / "before")  # before the first step
    train(model, optimizer, scaler, range(4))
    compression.save_checkpoint(Path(folder) / "after")
    books = held(compression)
    assert compression.state_dict()["unit"] == SCALE
    compression.close()
    return books


def load_from(folder: str, named: bool, before: dict[str, Any]) -> None:
    """Load before the first step, train, and load again; the sum of the residuals is the same.

    Args:
        folder: What `save_to` has filled.
        named: Whether the compression has its parameters' names before the first step.
        before: What `save_to` returned.
    """
    model = Model()
    compression, optimizer = compressed(model, named)
    for _ in range(2):
        compression.load_checkpoint(Path(folder) / "after")
        came = held(compression)
        assert came == before
        assert all(torch.tensor(came[name]).any() for name in came)
        assert compression.state_dict()["step"] == 4
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        train(model, optimizer, scaler, range(4, 6))
        assert compression.state_dict()["step"] == 6
    compression.load_checkpoint(Path(folder) / "before")
    assert not any(r.any() for r in compression.state_dict()["residual"].values())
    assert compression.stats().dropped_l1 == 0.0
    compression.close()


def go_on_in_a_process_set(folder: str) -> None:
    """Save after the last step, load before the first one, with the set's ranks alone."""
    (process_set,) = ALL_BUT_RANK_0
    if not process_set.included():
        return
    path = Path(folder) / "set"
    compression, optimizer = compressed(model := Model(), process_set=process_set)
    train(model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE), range(2))
    compression.save_checkpoint(path)
    saved = compression.state_dict()["residual"]
    compression.close()
    compression, optimizer = compressed(model := Model(), process_set=process_set)
    compression.load_checkpoint(path, process_set=process_set)
    loaded = compression.state_dict()["residual"]
    assert {name for name, residual in saved.items() if residual.any()} == {"large", "other"}
    assert all(torch.equal(loaded[name], residual) for name, residual in saved.items())
    train(model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE), range(2, 4))
    assert compression.state_dict()["step"] == 4
    assert compression.stats().dropped_l1 == 0.0
    compression.close()


def refuse_and_drop(folder: str) -> None:
    """A damaged file, another model and another rank's state, before and after the first step."""
    path = Path(folder) / "after"
    spoilt = next(path.glob("*-rank-1-of-*.pt"))
    hvd.barrier()
    if hvd.rank() == 0:
        spoilt.write_bytes(spoilt.read_bytes()[:-1])
    hvd.barrier()
    for named in (True, False):
        model = Model()
        compression, optimizer = compressed(model, named)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        with pytest.raises(CheckpointError, match=r"rank 1: .*-rank-1-of-"):
            compression.load_checkpoint(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compression.load_checkpoint(path, missing="drop")
        assert any("dropped" in str(w.message) for w in caught) == (hvd.rank() == 1)
        assert (compression.stats().dropped_l1 > 0) == (hvd.rank() == 1)
        train(model, optimizer, scaler, range(4, 6))
        compression.close()

    other = nn.Linear(50, 60)
    compression, optimizer = compressed(other)
    with pytest.raises(
        CheckpointError, match=r"rank 0, 2: residual of 'large': there is no such par"
    ):
        compression.load_checkpoint(path, missing="refuse")
    state = torch.load(next(path.glob("*-rank-0-of-*.pt")), weights_only=True)
    with pytest.raises(ConfigError, match="'large': there is no such parameter"):
        compression.load_state_dict(state)
    with pytest.warns(UserWarning, match="dropped residuals of"):
        compression.load_state_dict(state, strict=False)
    compression.close()

    model = Model()
    compression, optimizer = compressed(model, named=False)
    compression.load_state_dict(state)  # rank 0's, on every rank
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with pytest.raises(ConfigError, match=r"rank 1: .*must be that of rank 1 of"):
        train(model, optimizer, scaler, range(1))
    compression.close()


def warn_of_another_unit(folder: str) -> None:
    model = Model()
    compression, optimizer = compressed(model)
    compression.load_checkpoint(Path(folder) / "after")
    with pytest.warns(UserWarning, match="in units of a loss scale of 64, but .* with 8"):
        train(model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0), range(1))
    compression.close()


def train_alike(folder: str, kind: str, first: int, stop: int) -> None:
    """All ranks have the same gradients, so that of an average their number does not matter."""
    model, plain = Model(), Model()
    named = [(f"alike.{kind}.{name}", p) for name, p in model.named_parameters()]
    if kind == "topk":
        compression: Any = hvd_sparse.Compression.topk(named, density=0.02)
        inner: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    else:
        inner, compression = hvd_sparse.dgc_sgd(named, lr=1.0, density=1.0)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=compression)
    reference = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.0 if kind == "topk" else 0.9)
    path = Path(folder) / kind
    if first:
        model.load_state_dict(torch.load(path / "model"))
        compression.load_checkpoint(path)
    for step in range(stop):
        for owner, each in ((plain, reference), (model, optimizer)):
            if each is reference or step >= first:
                each.zero_grad()
                generator = torch.Generator().manual_seed(step)
                for p in owner.parameters():
                    (p * torch.randint(-9, 10, p.shape, generator=generator)).sum().backward()
                each.step()
    compression.save_checkpoint(path)
    if hvd.rank() == 0:
        torch.save(model.state_dict(), path / "model")
    residual = compression.state_dict()["residual"]
    for (name, p), q in zip(named, plain.parameters(), strict=True):
        waits = hvd.allreduce(residual.get(name, torch.zeros(p.shape)), name=f"{name}.{stop}")
        torch.testing.assert_close(p.detach() - waits, q.detach(), rtol=1e-5, atol=1e-4)
    compression.close()


@with_ranks(World(3), World(3, "mpi"))
def test_checkpoints_go_on_and_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    books = ranks.run(save_to, folder)[0].result
    for named in (True, False):
        ranks.run(load_from, folder, named, books)
    ranks.run(warn_of_another_unit, folder)
    ranks.run(go_on_in_a_process_set, folder)
    ranks.run(refuse_and_drop, folder)


@pytest.mark.launches
def test_checkpoints_change_the_world(tmp_path: Path) -> None:
    three, two = Ranks(World(3)), Ranks(World(2))
    try:
        books = three.run(save_to, str(tmp_path))[0].result
        for kind in ("topk", "dgc"):
            three.run(train_alike, str(tmp_path), kind, 0, 3)
        three.close()
        two.run(load_from, str(tmp_path), True, books)
        for kind in ("topk", "dgc"):
            two.run(train_alike, str(tmp_path), kind, 3, 6)
        two.close()
    finally:
        three.kill()
        two.kill()
