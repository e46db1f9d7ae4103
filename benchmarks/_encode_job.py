"""What the encoder's benchmark works on: one step of a running job, and the torch pipelines that
one would write for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.ops import Accumulation, Before, Momentum

WARMUP_STEPS = 4
PIVOT_FACTOR = 0.9
MOMENTUM = 0.9
GROUP_NUMEL = 512
HASH_A, HASH_B = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def gradient_like(numel: int, seed: int, device: torch.device) -> Tensor:
    """Normal within a layer, on scales that differ between layers: heavier tails than a normal."""
    generator = torch.Generator(device).manual_seed(seed)
    gradient = torch.randn(numel, generator=generator, device=device)
    layer_numel = max(1, numel // 50)
    for i, layer in enumerate(gradient.split(layer_numel)):
        layer.mul_(0.5 + (i * 7 % 50) / 25)
    return gradient


class Job:
    """The state of one rank before a step, and what each operation gets of it.

    A few steps of exact top-k have passed over the residual, and of DGC over the velocity and its
    momentum buffer.

    Attributes:
        gradient: float32 `(n,)`.
        k: Entries to select.
        residual: Working copy, float32 `(n,)`; `reset` restores it.
        threshold: The k-th magnitude of residual + gradient.
        pivot: The guess at it that the last step's threshold gives.
        velocity: Working copy of DGC's v.
        buffer: Working copy of DGC's u.
        corrected_threshold: The k-th magnitude of what v becomes.
        corrected_pivot: The guess at it.
        plain: The gradient, on its way into the residual.
        apart: The same, out of the residual into another one.
        corrected: The gradient, on its way into the velocity.
        nesterov: The same with Nesterov's momentum.
    """

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.k = max(1, round(numel * density))
        self.numel = numel
        self.device = device
        self._residual = torch.zeros(numel, device=device)
        self._velocity = torch.zeros(numel, device=device)
        self._buffer = torch.zeros(numel, device=device)
        last = last_corrected = 0.0
        for seed in range(WARMUP_STEPS):
            g = gradient_like(numel, seed, device)
            _, _, last = ops.accumulate_topk(Accumulation(self._residual, [g]), self.k)
            corrected = Accumulation(self._velocity, [g], Momentum(self._buffer, MOMENTUM))
            indices, _, last_corrected = ops.accumulate_topk(corrected, self.k)
            ops.zero_at(self._buffer, indices)
        self.gradient = gradient_like(numel, WARMUP_STEPS, device)
        self.pivot = PIVOT_FACTOR * last
        self.corrected_pivot = PIVOT_FACTOR * last_corrected
        self.threshold = ops.kth_magnitude(self._residual + self.gradient, self.k)
        sums = self._buffer * MOMENTUM + self.gradient + self._velocity
        self.corrected_threshold = ops.kth_magnitude(sums, self.k)
        self.residual = self._residual.clone()
        self.velocity = self._velocity.clone()
        self.buffer = self._buffer.clone()
        self.plain = Accumulation(self.residual, [self.gradient])
        self._after = torch.empty_like(self.residual)
        self.apart = Accumulation(self._after, [self.gradient], before=Before(self.residual))
        self.corrected = self._corrected(Momentum(self.buffer, MOMENTUM))
        self.nesterov = self._corrected(Momentum(self.buffer, MOMENTUM, nesterov=True))
        # A selection's indices, as int32 for us and as int64 for torch.
        self.indices = ops.accumulate_select(Accumulation(sums), self.threshold)[0]
        self.long_indices = self.indices.long()
        self.group_k = max(1, round(GROUP_NUMEL * density))
        self.partition = (numel // 4, numel // 2)

    def _corrected(self, momentum: Momentum) -> Accumulation:
        return Accumulation(self.velocity, [self.gradient], momentum)

    def reset(self) -> None:
        """Undoes what an operation has changed."""
        self.residual.copy_(self._residual)
        self.velocity.copy_(self._velocity)
        self.buffer.copy_(self._buffer)

    def state(self) -> tuple[Tensor, ...]:
        return (self.residual.clone(), self.velocity.clone(), self.buffer.clone())


def _take(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    values = x[indices]
    x[indices] = 0.0
    return indices, values


def _reaching(x: Tensor, threshold: float) -> Tensor:
    return torch.nonzero(x.abs() >= threshold).view(-1)


def torch_topk(job: Job) -> object:
    job.residual.add_(job.gradient)
    return _take(job.residual, torch.topk(job.residual.abs(), job.k, sorted=False).indices)


def torch_nonzero(job: Job) -> object:
    job.residual.add_(job.gradient)
    return _take(job.residual, _reaching(job.residual, job.threshold))


def torch_momentum(job: Job) -> object:
    u, v = job.buffer, job.velocity
    u.mul_(MOMENTUM).add_(job.gradient)
    v.add_(u)
    indices, values = _take(v, _reaching(v, job.corrected_threshold))
    u[indices] = 0.0
    return indices, values


def torch_nesterov(job: Job) -> object:
    u, v = job.buffer, job.velocity
    u.add_(job.gradient).mul_(MOMENTUM)
    v.add_(u).add_(job.gradient)
    indices, values = _take(v, _reaching(v, job.corrected_threshold))
    u[indices] = 0.0
    return indices, values


def torch_momentum_topk(job: Job) -> object:
    u, v = job.buffer, job.velocity
    u.mul_(MOMENTUM).add_(job.gradient)
    v.add_(u)
    indices, values = _take(v, torch.topk(v.abs(), job.k, sorted=False).indices)
    u[indices] = 0.0
    return indices, values


def torch_partition(job: Job) -> object:
    start, stop = job.partition
    job.residual.add_(job.gradient)
    own = job.residual[start:stop]
    return _take(own, _reaching(own, job.threshold))


def torch_hash(slots: int) -> Callable[[Job], object]:
    def pipeline(job: Job) -> object:
        job.residual.add_(job.gradient)
        indices = _reaching(job.residual, job.threshold)
        hashes = (indices * (HASH_A - 2**64) + (HASH_B - 2**64)) >> 32 & 0xFFFFFFFF
        table = torch.full((slots,), -1, dtype=torch.int64, device=indices.device)
        table[hashes * slots >> 32] = indices
        return _take(job.residual, table[table >= 0])

    return pipeline


def torch_group(job: Job) -> object:
    job.residual.add_(job.gradient)
    groups = job.residual[: job.numel // GROUP_NUMEL * GROUP_NUMEL].view(-1, GROUP_NUMEL)
    places = torch.topk(groups.abs(), job.group_k, dim=1, sorted=False).indices
    values = groups.gather(1, places)
    groups.scatter_(1, places, 0.0)
    return places, values


def torch_sampled_threshold(job: Job) -> object:
    sample = (job.residual[17::100] + job.gradient[17::100]).abs()
    return float(torch.topk(sample, max(1, job.k // 100)).values[-1])


def torch_take_at(job: Job) -> object:
    return _take(job.residual, job.long_indices)
