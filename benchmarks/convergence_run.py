"""One training for benchmarks.convergence: P ranks in threads, with the engine that Horovod uses.

Every rank has its own replica, its own batches, and its own engine over the local transport; small
tensors are averaged densely, as Horovod would. At the end all replicas must have the same bits.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence_tasks import Budget, Task
from benchmarks.powersgd import Compressed, PowerSgd
from hvd_sparse import MomentumCorrectedSGD, SparseAdamW
from hvd_sparse.adapter.session import RunOptions
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.hosts import Hosts, Slot, grid_of
from hvd_sparse.optim import REDUCED_BY
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import LocalTransport, LocalWorld, run_ranks


@dataclass
class Run:
    """The result of one training. Densities are shares of the parameters that are sent sparsely.

    Attributes:
        final: The task's final metric.
        curve: The task's metric along the run, at equal distances.
        density: Entries that a rank selected, per element and step, warm-up included. With ExDyna
            and CLT-k a rank selects its P-th part of what is applied; in two levels, its shard's.
        applied: Entries of the sum that was applied, per element and step.
        late_density: `density` over the last quarter of the steps.
        late_applied: `applied` over the last quarter.
        updates: Times that a parameter was updated after the warm-up, on average.
        mbytes: Megabytes that a rank sent, the dense parameters by a ring allreduce; what hosts
            exchange inside goes through memory, and does not count.
        dense_mbytes: Megabytes of the same steps by a dense ring allreduce.
        xi: Ok-Topk's ξ at the ends of the curve's parts; only where it has plain error feedback.
        seconds: Duration; depends on the machine's other load.
    """

    final: float = 0.0
    curve: list[float] = field(default_factory=list)
    density: float = 1.0
    applied: float = 1.0
    late_density: float = 1.0
    late_applied: float = 1.0
    updates: float = 0.0
    mbytes: float = 0.0
    dense_mbytes: float = 0.0
    xi: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Counts:
    """The counts of one rank's engine up to a step."""

    step: int = 0
    selected: int = 0
    applied: int = 0
    sent_bytes: int = 0


class Averaging:
    """Averages the ranks' gradients, through an engine or densely."""

    def __init__(
        self,
        model: nn.Module,
        method: Method | PowerSgd | None,
        engine: LocalTransport,
        dense: Transport,
        hosts: int = 0,
    ):
        self.named = list(model.named_parameters())
        self.dense = dense
        self.low_rank: Compressed | None = None
        if isinstance(method, PowerSgd):
            self.low_rank, method = Compressed(method.rank, self.mean), None
        self.momentum = 0.0 if method is None else method.memory.momentum
        self.is_preconditioned = method is not None and method.memory.preconditioned
        self.engine: Engine | None = None
        if method is not None:
            self.engine = Engine(method)
            self.engine.connect(engine)
            if hosts:
                L = engine.world_size // hosts
                slots = [Slot(rank % L, L, rank // L) for rank in range(engine.world_size)]
                self.engine.hosts = Hosts(engine, grid_of(slots, engine.rank))
            self.engine.scale = 1 / engine.world_size

    def is_sparse(self, parameter: Tensor) -> bool:
        return self.engine is not None and parameter.numel() >= RunOptions.dense_below

    def corrects_momentum(self, parameter: Tensor) -> bool:
        """For `MomentumCorrectedSGD`, which asks its compression."""
        return self.momentum > 0 and self.is_sparse(parameter)

    def preconditions(self, parameter: Tensor) -> bool:
        """For `SparseAdamW`."""
        return self.is_preconditioned and self.is_sparse(parameter)

    def serve(self, optimizer: Any) -> None:
        """Be the compression of what an optimizer has."""
        REDUCED_BY.update((p, weakref.ref(self)) for _, p in self.named)
        if self.engine is not None and self.is_preconditioned:
            named = dict(self.named)
            self.engine.exponents_of = lambda name: optimizer.state[named[name]].get("exponent")

    def average(self) -> None:
        """Replace every gradient by the mean."""
        for name, p in self.named:
            assert p.grad is not None
            if self.engine is not None and self.is_sparse(p):
                self.engine.submit(TensorSpec(name, tuple(p.shape), str(p.dtype)), p.grad)
        rest = [p for _, p in self.named if not self.is_sparse(p)]
        if self.low_rank is not None:
            rest = [p for p in rest if p.ndim < 2]
            for name, p in self.named:
                if p.ndim > 1 and p.grad is not None:
                    p.grad = self.low_rank.average(name, p.grad)
        if rest:
            mean = self.mean(torch.cat([p.grad.view(-1) for p in rest if p.grad is not None]))
            for p, part in zip(rest, mean.split([p.numel() for p in rest]), strict=True):
                p.grad = part.view(p.shape).clone()
        for name, p in self.named:
            if self.engine is not None and self.is_sparse(p):
                self.engine.scale = self.engine.scale or 1 / self.dense.world_size
                p.grad = self.engine.result(name)

    def mean(self, vector: Tensor) -> Tensor:
        """The mean over all ranks."""
        total = self.dense.allreduce_sum(vector.view(-1), channel="dense")
        return total.view_as(vector) / self.dense.world_size

    def counts(self, step: int) -> Counts:
        """The counts up to a step."""
        if self.engine is None:
            return Counts(step)
        total = self.engine.stats().totals
        return Counts(step, total.nnz_selected, total.nnz_applied, total.bytes_sent)

    @property
    def sparse_numel(self) -> int:
        """Elements that are sent sparsely."""
        return sum(p.numel() for _, p in self.named if self.is_sparse(p))

    @property
    def dense_numel(self) -> int:
        """Elements that are not."""
        return sum(p.numel() for _, p in self.named) - self.sparse_numel

    def averaged(self, steps: int) -> float:
        """Elements of dense sums, per step."""
        if self.low_rank is None:
            return self.dense_numel
        vectors = sum(p.numel() for _, p in self.named if p.ndim < 2)
        return vectors + self.low_rank.sent / steps

    def accumulator(self) -> Tensor:
        """The accumulator of plain error feedback: ε + g, float32 `(n,)`."""
        assert self.engine is not None
        residual = self.engine.state_dict()["residual"]
        parts = []
        for name, p in self.named:
            if self.is_sparse(p) and p.grad is not None:
                parts.append((p.grad + residual.get(name, 0.0)).view(-1))
        return torch.cat(parts)

    def gradient(self) -> Tensor:
        """g alone."""
        parts = [p.grad.view(-1) for _, p in self.named if self.is_sparse(p) and p.grad is not None]
        return torch.cat(parts)


def train(
    task: Task,
    method: Method | PowerSgd | None,
    seed: int,
    world_size: int,
    budget: Budget,
    *,
    measure_xi: bool = False,
    hosts: int = 0,
    beta1: float = 0.0,
) -> Run:
    """Train once.

    Args:
        task: What to train.
        method: How to compress; None: dense.
        seed: Seed of the weights and the batches.
        world_size: P.
        budget: Length and rate of the training.
        measure_xi: Whether to follow Ok-Topk's Assumption 1.
        hosts: For two levels, how many hosts the ranks have; 0: flat.
        beta1: AdamW's, where that is the task's optimizer.
    """
    start = time.perf_counter()
    dense_world = LocalWorld(world_size, timeout_s=600.0)
    shared: dict[str, Any] = {"rows": [None] * world_size, "xi": []}
    barrier = Barrier(world_size)
    models = [task.model(seed) for _ in range(world_size)]  # here: threads share torch's seed
    warm = 0 if not isinstance(method, Method) else method.warmup.dense_steps + method.warmup.steps
    points = {budget.steps * (i + 1) // task.curve_points for i in range(task.curve_points)}

    def worker(transport: LocalTransport) -> tuple[Run, list[Tensor]]:
        rank, recipe, run = transport.rank, task.recipe, Run()
        model = models[rank]
        averaging = Averaging(model, method, transport, dense_world.transport(rank), hosts)
        has_adamw, limit = recipe.optimizer == "adamw", recipe.clip_norm
        optimizer = (
            SparseAdamW(model.parameters(), budget.lr, (beta1, 0.999))
            if has_adamw
            else MomentumCorrectedSGD(model.parameters(), budget.lr, recipe.momentum)
        )
        averaging.serve(optimizer)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        counts: dict[int, Counts] = {}
        for step in range(budget.steps):
            if step in (warm, budget.steps * 3 // 4):
                counts[step] = averaging.counts(step)
            for group in optimizer.param_groups:
                group["lr"] = budget.lr_at(step, recipe.lr_warmup_steps)
            optimizer.zero_grad(set_to_none=True)
            task.loss(model, generator).backward()
            clips_mean = has_adamw and method is None  # otherwise as `clip_norm` does
            if not clips_mean:
                own = limit * world_size**0.5 if has_adamw else limit
                nn.utils.clip_grad_norm_(model.parameters(), own)
            if measure_xi and step + 1 in points:
                shared["rows"][rank] = (averaging.accumulator(), averaging.gradient())
                if barrier.wait() == 0:
                    assert isinstance(method, Method)
                    shared["xi"].append(xi_of(shared["rows"], method))
                barrier.wait()
            averaging.average()
            if clips_mean:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            if rank == 0 and step + 1 in points:
                run.curve.append(task.evaluate(model))
        describe(run, averaging, counts[warm], counts[budget.steps * 3 // 4], budget)
        if averaging.engine is not None:
            averaging.engine.disconnect()
        return run, [p.detach() for p in model.parameters()]

    results = run_ranks(world_size, worker, timeout_s=600.0, limit_s=36_000.0)
    first_run, first = results[0]
    for _, weights in results[1:]:
        if not all(torch.equal(a, b) for a, b in zip(first, weights, strict=True)):
            raise RuntimeError(f"{task.name}: the replicas have drifted apart")
    first_run.final = first_run.curve[-1]
    first_run.mbytes = sum(run.mbytes for run, _ in results) / world_size
    first_run.density = sum(run.density for run, _ in results) / world_size
    first_run.late_density = sum(run.late_density for run, _ in results) / world_size
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


def describe(run: Run, averaging: Averaging, warm: Counts, late: Counts, budget: Budget) -> None:
    """Fill in the densities and bytes of a rank."""
    P, sparse = averaging.dense.world_size, averaging.sparse_numel
    ring = 2 * (P - 1) / P * 4 * budget.steps / 1e6
    run.dense_mbytes = ring * (sparse + averaging.dense_numel)
    end = averaging.counts(budget.steps)
    run.mbytes = ring * averaging.averaged(budget.steps) + end.sent_bytes / 1e6
    run.updates = float(budget.steps - warm.step)
    if averaging.engine is not None:
        quarter = sparse * (end.step - late.step)
        run.density = end.selected / (sparse * end.step)
        run.applied = end.applied / (sparse * end.step)
        run.late_density = (end.selected - late.selected) / quarter
        run.late_applied = (end.applied - late.applied) / quarter
        run.updates = (end.applied - warm.applied) / sparse
