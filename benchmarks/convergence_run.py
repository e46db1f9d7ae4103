"""One training for benchmarks.convergence: P ranks in threads, on the engine that Horovod gets.

Every rank has its own replica, its own batches, and its own engine over the local transport; small
tensors are averaged densely, as Horovod would. At the end all replicas must have the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence_tasks import Task
from hvd_sparse import MomentumCorrectedSGD
from hvd_sparse.constructors import RunOptions
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import LocalWorld, run_ranks

XI_INTERVAL = 20
"""Steps from one measurement of ξ to the next."""


@dataclass
class Run:
    """What came of one training.

    Attributes:
        final: The task's metric in the end.
        loss: Training loss on rank 0, a mean for every ten steps.
        density: Entries applied, per element and step, warm-up included.
        late_density: The same over the last half of the steps.
        selected: Entries that a rank selected per element and step, over the last half.
        xi: Ok-Topk's ξ, every `XI_INTERVAL` steps; empty for others.
        seconds: Time that it took.
    """

    final: float
    loss: list[float]
    density: float
    late_density: float
    selected: float
    xi: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Averaging:
    """How the ranks' gradients become their mean: through an engine, or densely."""

    def __init__(
        self, model: nn.Module, method: Method | None, engine: Transport, dense: Transport
    ):
        self.named = list(model.named_parameters())
        self.dense = dense
        self.momentum = 0.0 if method is None else method.memory.momentum
        self.engine: Engine | None = None
        if method is not None:
            self.engine = Engine(method)
            self.engine.connect(engine)
            self.engine.scale = 1 / engine.world_size

    def is_sparse(self, parameter: Tensor) -> bool:
        return self.engine is not None and parameter.numel() >= RunOptions.dense_below

    def corrects_momentum(self, parameter: Tensor) -> bool:
        """For `MomentumCorrectedSGD`, which asks its compression."""
        return self.momentum > 0 and self.is_sparse(parameter)

    def average(self) -> None:
        """Put the mean in the place of every gradient."""
        for name, p in self.named:
            assert p.grad is not None
            if self.engine is not None and self.is_sparse(p):
                self.engine.submit(TensorSpec(name, tuple(p.shape), str(p.dtype)), p.grad)
        rest = [p for _, p in self.named if not self.is_sparse(p)]
        if rest:
            flat = torch.cat([p.grad.view(-1) for p in rest if p.grad is not None])
            mean = self.dense.allreduce_sum(flat, channel="dense") / self.dense.world_size
            for p, part in zip(rest, mean.split([p.numel() for p in rest]), strict=True):
                p.grad = part.view(p.shape).clone()
        for name, p in self.named:
            if self.engine is not None and self.is_sparse(p):
                self.engine.scale = self.engine.scale or 1 / self.dense.world_size
                p.grad = self.engine.result(name)

    def accumulator(self) -> Tensor:
        """What the step selects from: ε + g, or v + m u + g; float32 `(n,)`."""
        assert self.engine is not None
        state = self.engine.state_dict()
        parts = []
        for name, p in self.named:
            if self.is_sparse(p) and p.grad is not None:
                total = p.grad.clone()
                for kind, factor in (("residual", 1.0), ("momentum", self.momentum)):
                    if name in state[kind]:
                        total += factor * state[kind][name]
                parts.append(total.view(-1))
        return torch.cat(parts)

    def gradient(self) -> Tensor:
        """g alone."""
        parts = [p.grad.view(-1) for _, p in self.named if self.is_sparse(p) and p.grad is not None]
        return torch.cat(parts)


def train(
    task: Task, method: Method | None, seed: int, world_size: int, *, measure_xi: bool = False
) -> Run:
    """Train once.

    Args:
        task: What to train.
        method: How to compress; None: dense.
        seed: Of the weights and the batches.
        world_size: P.
        measure_xi: Whether to follow Ok-Topk's Assumption 1.
    """
    start = time.perf_counter()
    dense_world = LocalWorld(world_size, timeout_s=600.0)
    shared: dict[str, Any] = {"rows": [None] * world_size, "xi": []}
    barrier = Barrier(world_size)
    models = [task.model(seed) for _ in range(world_size)]  # here: threads share torch's seed

    def worker(transport: Transport) -> tuple[Run, list[Tensor]]:
        rank = transport.rank
        model = models[rank]
        averaging = Averaging(model, method, transport, dense_world.transport(rank))
        recipe = task.recipe
        optimizer = MomentumCorrectedSGD(model.parameters(), recipe.lr, recipe.momentum)
        vars(optimizer)["_compression"] = averaging  # as Horovod's optimizer has one
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        losses: list[float] = []
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr_at(step)
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model, generator)
            loss.backward()
            losses.append(float(loss.detach()))
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            if measure_xi and step % XI_INTERVAL == 0:
                shared["rows"][rank] = (averaging.accumulator(), averaging.gradient())
                if barrier.wait() == 0:
                    assert method is not None
                    shared["xi"].append(xi_of(shared["rows"], method))
                barrier.wait()
            averaging.average()
            optimizer.step()
        run = Run(task.evaluate(model), means_of_ten(losses), 1.0, 1.0, 1.0)
        if averaging.engine is not None:
            describe(run, averaging.engine)
            averaging.engine.disconnect()
        return run, [p.detach() for p in model.parameters()]

    results = run_ranks(world_size, worker, timeout_s=600.0, limit_s=3600.0)
    first_run, first = results[0]
    for _, weights in results[1:]:
        if not all(torch.equal(a, b) for a, b in zip(first, weights, strict=True)):
            raise RuntimeError(f"{task.name}: the replicas have drifted apart")
    first_run.xi = shared["xi"]
    first_run.seconds = time.perf_counter() - start
    return first_run


def xi_of(rows: list[tuple[Tensor, Tensor]], method: Method) -> float:
    """ξ of one step (Ok-Topk, equation 5), from every rank's accumulator and gradient."""
    k = method.k(rows[0][0].numel())
    best = top_k(torch.stack([acc for acc, _ in rows]).mean(0), k)
    ours = top_k(torch.stack([top_k(acc, k) for acc, _ in rows]).mean(0), k)
    gradient = torch.stack([g for _, g in rows]).mean(0)
    return float((best - ours).norm() / gradient.norm())


def top_k(x: Tensor, k: int) -> Tensor:
    """The k largest magnitudes of a vector, and zeros elsewhere."""
    chosen = x.abs().topk(k).indices
    return torch.zeros_like(x).index_copy(0, chosen, x[chosen])


def describe(run: Run, engine: Engine) -> None:
    """The densities that a run had."""
    buckets = engine.stats().buckets
    numel = sum(b.numel for b in buckets)
    run.density = sum(b.nnz_applied for b in buckets) / (numel * buckets[0].steps)
    late = [list(b.history)[len(b.history) // 2 :] for b in buckets]
    steps = len(late[0])
    run.late_density = sum(s.nnz_applied for b in late for s in b) / (numel * steps)
    run.selected = sum(s.nnz_selected for b in late for s in b) / (numel * steps)


def means_of_ten(values: list[float]) -> list[float]:
    return [sum(ten) / len(ten) for ten in (values[i : i + 10] for i in range(0, len(values), 10))]
