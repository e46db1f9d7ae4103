"""Every compressor's hot path: what one rank does in a step, and its baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from hvd_sparse.ops import Accumulation
from hvd_sparse.ops._dispatch import Ops
from hvd_sparse.selectors import sampled
from tools.kernels import GROUP_NUMEL, HASH_SEED, MOMENTUM, Job

ADD = "r.add_(g)"
SELECT = "accumulate, select, zero"
MOMENTUM_SHARE = 20 / 12
"""Bytes per element of DGC's pass, three reads and two writes, over those of `r.add_(g)`."""


@dataclass(frozen=True)
class Limit:
    """A path may take at most `factor` times `share` of a baseline's time.

    Attributes:
        factor: None without a goal.
        everywhere: Whether the goal holds at every density, not only at the lowest.
    """

    share: float = 1.0
    factor: float | None = None
    everywhere: bool = False


@dataclass(frozen=True)
class HotPath:
    """One operation of a rank's step.

    Attributes:
        run: Performs it with the given implementation of the operations.
        against: Other contenders' names, with their limits.
        torch: Equivalent pipelines of torch operations; the goal is for the fastest.
        speedup: Least ratio to that pipeline at the lowest density.
    """

    metric: str
    run: Callable[[Ops, Job], object]
    torch: Mapping[str, Callable[[Job], object]]
    against: Mapping[str, Limit] = field(default_factory=dict)
    speedup: float | None = None


def momentum_masked(o: Ops, job: Job, corrected: Accumulation) -> object:
    """DGC: accumulate the corrected momentum, select from it, and mask the buffer there."""
    indices, values = o.accumulate_select(corrected, job.corrected_threshold)
    o.take_at(job.buffer, indices)
    return indices, values


def momentum_topk_masked(o: Ops, job: Job) -> object:
    indices, values, threshold = o.accumulate_topk(job.corrected, job.k)
    o.take_at(job.buffer, indices)
    return indices, values, threshold


def sampled_threshold(o: Ops, job: Job) -> object:
    """As `selectors.SampledThreshold` estimates it."""
    runs, run_numel = sampled.runs_of(job.numel, sampled.SAMPLE_SHARE)
    sample = o.sample_accumulator(job.plain, runs, run_numel, HASH_SEED)
    return sampled.deep_threshold(sample.view(-1, run_numel), job.numel, job.k)


def hashed(o: Ops, job: Job, slots_per_k: int, slots_per_bucket: int) -> object:
    slots = slots_per_k * job.k // slots_per_bucket * slots_per_bucket
    return o.hash_select(job.plain, job.threshold, slots, slots_per_bucket, HASH_SEED)


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
        hashes = indices * (HASH_SEED - 2**64) >> 32 & 0xFFFFFFFF
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


def hot_paths(job: Job) -> list[HotPath]:
    compaction = {
        "torch add, abs, topk, gather, zero": torch_topk,
        "torch add, abs, compare, nonzero, gather, zero": torch_nonzero,
    }
    hashing = {
        "torch add, abs, compare, nonzero, hash, scatter, gather, zero": torch_hash(4 * job.k)
    }
    within_passes = Limit(MOMENTUM_SHARE, 1.3)
    not_slower = Limit(factor=1.05, everywhere=True)  # 5 % for what two equal times differ
    return [
        HotPath(
            SELECT,
            lambda o, job: o.accumulate_select(job.plain, job.threshold),
            compaction,
            {ADD: Limit(factor=1.25)},
            speedup=8.0,
        ),
        HotPath(
            f"{SELECT}, out of another residual",
            lambda o, job: o.accumulate_select(job.apart, job.threshold),
            {},
            {ADD: Limit(), SELECT: not_slower},
        ),
        HotPath(
            "accumulate, exact top-k",
            lambda o, job: o.accumulate_topk(job.plain, job.k),
            {"torch add, abs, topk, gather, zero": torch_topk},
            {ADD: Limit()},
            speedup=20.0,
        ),
        HotPath(
            "DGC: momentum, select, zero, mask",
            lambda o, job: momentum_masked(o, job, job.corrected),
            {"torch mul, add, add, abs, compare, nonzero, gather, zero": torch_momentum},
            {ADD: within_passes},
            speedup=7.0,
        ),
        HotPath(
            "DGC with Nesterov's momentum",
            lambda o, job: momentum_masked(o, job, job.nesterov),
            {"torch add, mul, add, add, abs, compare, …, zero": torch_nesterov},
            {ADD: Limit(MOMENTUM_SHARE)},
        ),
        HotPath(
            "DGC with exact top-k",
            momentum_topk_masked,
            {"torch mul, add, add, abs, topk, gather, zero": torch_momentum_topk},
            {ADD: Limit(MOMENTUM_SHARE)},
        ),
        HotPath(
            "DRAGONN: hash to 4k slots",
            partial(hashed, slots_per_k=4, slots_per_bucket=1),
            hashing,
            {ADD: Limit(), SELECT: not_slower},
        ),
        HotPath(
            "DRAGONN: hash to 2k slots by 8",
            partial(hashed, slots_per_k=2, slots_per_bucket=8),
            hashing,
            {ADD: Limit(), SELECT: not_slower},
        ),
        HotPath(
            "ExDyna: select in a quarter",
            lambda o, job: o.accumulate_select(job.plain, job.threshold, *job.partition),
            {"torch add, abs, compare, nonzero, gather, zero": torch_partition},
            {ADD: Limit()},
        ),
        HotPath(
            f"top-k of every {GROUP_NUMEL}",
            lambda o, job: o.accumulate_group_topk(job.plain, job.group_k, GROUP_NUMEL),
            {"torch add, abs, topk by row, gather, scatter": torch_group},
            {ADD: Limit()},
        ),
        HotPath(
            "sampled threshold",
            sampled_threshold,
            {"torch strided add, abs, topk": torch_sampled_threshold},
            {SELECT: Limit(factor=0.15, everywhere=True)},
        ),
        HotPath(
            "take at k indices",
            lambda o, job: o.take_at(job.residual, job.indices),
            {"torch gather, zero": torch_take_at},
        ),
    ]
