"""Compressions that start in other ways: uncalled constructors, one process, a new world."""

from __future__ import annotations

import os
import subprocess

import horovod.torch as hvd
import pytest
import torch
from torch import nn

import hvd_sparse
from tests.launch import horovodrun, launch_environment, python_command
from tests.ranks import Ranks, World, with_ranks


def train_by_defaults() -> list[int]:
    """Give constructors to two optimizers; how many steps were compressed, by optimizer."""
    steps = []
    for turn in ("first", "second"):
        torch.manual_seed(7)
        model = nn.Linear(60, 50)
        named = [(f"uncalled.{turn}.{name}", p) for name, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=named,
            compression=hvd_sparse.Compression.topk,
        )
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(4, 60)).square().mean().backward()
            optimizer.step()
        compression = optimizer._compression
        assert isinstance(compression, type(hvd_sparse.Compression.topk()))
        steps += [bucket.steps for bucket in compression.stats().buckets]
        everyone = hvd.allgather(model.weight.detach()[None], name=f"uncalled.{turn}")
        assert all(torch.equal(everyone[0], other) for other in everyone)
        compression.close()
    return steps


def train_alone() -> None:
    assert hvd.size() == 1
    model = nn.Linear(40, 30)
    embedding = nn.Embedding(9, 40, sparse=True)
    named = [*model.named_parameters(), *embedding.named_parameters("embedding")]
    compression = hvd_sparse.Compression.oktopk(named, density=0.1)
    compression.exchange_embeddings(named)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.01),
        named_parameters=named,
        compression=compression,
    )
    before = embedding.weight.detach().clone()
    x, losses = torch.randn(64, 40), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x + embedding(torch.arange(64) % 9)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0], losses
    assert bool((embedding.weight != before).any(1).all()), "the embedding did not learn"
    steps = sum(bucket.steps for bucket in compression.stats().buckets)
    assert steps == (30 if os.environ.get("HOROVOD_ELASTIC") == "1" else 0), steps
    assert compression.stats().totals.bytes_sent == 0
    print("TRAINED")


STEPS, COMMIT_EVERY, DEATH = 30, 5, 13


def train_through_a_death() -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 30)
    compression = hvd_sparse.Compression.oktopk(
        model.named_parameters(), density=0.02, timeout_s=20.0
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    committed: dict[str, torch.Tensor] = {}

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if hvd.size() == 1:
            restored = compression.state_dict()["residual"]
            assert committed, "nothing was committed"
            assert all(torch.equal(restored[name], committed[name]) for name in committed)
            assert any(value.any() for value in committed.values())
        while state.step < STEPS:
            if state.step == DEATH and hvd.rank() == 1:
                os._exit(1)
            model.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                committed.update(compression.state_dict()["residual"])

    state = hvd.elastic.TorchState(model, optimizer, compression=compression, step=0)
    denser = hvd_sparse.Compression.oktopk(density=0.04)
    state.register_reset_callbacks([lambda: compression.reassign(denser.method)])
    train(state)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert compression.stats().buckets[0].density_target == 0.04
    print(f"RECOVERED world {hvd.size()} step {state.step}", flush=True)


@with_ranks(World(2, "gloo"))
def test_a_constructor_that_was_not_called_has_its_defaults(ranks: Ranks) -> None:
    assert all(told.result == [3, 3] for told in ranks.run(train_by_defaults))


@pytest.mark.parametrize("elastic", ["", "1"])
def test_a_process_of_its_own(elastic: str) -> None:
    done = subprocess.run(
        python_command(train_alone),
        env=launch_environment({"HOROVOD_ELASTIC": elastic}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINED" in done.stdout


@pytest.mark.launches
def test_elastic_recovers_with_its_residuals() -> None:
    done = horovodrun(
        2,
        train_through_a_death,
        hosts="localhost:1,127.0.0.1:1",
        options=["--min-np", "1", "--network-interface", "lo"],
        timeout=150,
    )
    assert "RECOVERED world 1" in done.stdout
