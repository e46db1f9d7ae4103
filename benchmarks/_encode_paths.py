"""Every compressor's hot path: what one rank does in a step, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks import _encode_job as pipelines
from benchmarks._encode_job import GROUP_NUMEL, HASH_A, HASH_B, Job
from hvd_sparse.ops import Accumulation
from hvd_sparse.ops._dispatch import Ops
from hvd_sparse.selectors import sampled

ADD = "r.add_(g)"
SELECT = "accumulate, select, zero"
MOMENTUM_SHARE = 20 / 12
"""Bytes per element of DGC's pass, three reads and two writes, over those of `r.add_(g)`."""


@dataclass(frozen=True)
class Limit:
    """A baseline that a path is held against: at most `factor` times `share` of its time.

    Attributes:
        factor: None where nothing is required.
        everywhere: At every density, and not only at the lowest.
    """

    share: float = 1.0
    factor: float | None = None
    everywhere: bool = False


@dataclass(frozen=True)
class HotPath:
    """What one rank does in a step.

    Attributes:
        run: Does it with the operations that it is given.
        against: Other contenders' names, with their limits.
        torch: What one would write in torch; the goal is for the faster.
        speedup: How many times as fast as that it has to be at the lowest density.
    """

    metric: str
    run: Callable[[Ops, Job], object]
    torch: Mapping[str, Callable[[Job], object]]
    against: Mapping[str, Limit] = field(default_factory=dict)
    speedup: float | None = None


def momentum_masked(o: Ops, job: Job, corrected: Accumulation) -> object:
    """DGC: the corrected momentum is accumulated and selected from, and masked where it left."""
    indices, values = o.accumulate_select(corrected, job.corrected_threshold)
    o.zero_at(job.buffer, indices)
    return indices, values


def momentum_topk_masked(o: Ops, job: Job) -> object:
    indices, values, threshold = o.accumulate_topk(job.corrected, job.k, job.corrected_pivot)
    o.zero_at(job.buffer, indices)
    return indices, values, threshold


def sampled_threshold(o: Ops, job: Job) -> object:
    """As `selectors.SampledThreshold` estimates it."""
    stride = sampled.sample_stride(job.numel, sampled.SAMPLE_SHARE)
    sample = o.sample_accumulator(job.plain, 0, stride, min(sampled.RUN, stride))
    rank = sampled.deep_rank(sample.numel(), job.numel, job.k)
    return o.kth_magnitude(sample, rank)


def hashed(slots_per_k: int, slots_per_bucket: int) -> Callable[[Ops, Job], object]:
    return lambda o, job: o.hash_select(
        job.plain,
        job.threshold,
        slots_per_k * job.k,
        slots_per_bucket,
        HASH_A,
        HASH_B,
    )


def hot_paths(job: Job) -> list[HotPath]:
    compaction = {
        "torch add, abs, topk, gather, zero": pipelines.torch_topk,
        "torch add, abs, compare, nonzero, gather, zero": pipelines.torch_nonzero,
    }
    topk = {"torch add, abs, topk, gather, zero": pipelines.torch_topk}
    hashing = {
        "torch add, abs, compare, nonzero, hash, scatter, gather, zero": pipelines.torch_hash(
            4 * job.k
        )
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
            lambda o, job: o.accumulate_topk(job.plain, job.k, job.pivot),
            topk,
            {ADD: Limit()},
            speedup=20.0,
        ),
        HotPath(
            "accumulate, exact top-k, no pivot",
            lambda o, job: o.accumulate_topk(job.plain, job.k),
            topk,
            {ADD: Limit()},
        ),
        HotPath(
            "DGC: momentum, select, zero, mask",
            lambda o, job: momentum_masked(o, job, job.corrected),
            {"torch mul, add, add, abs, compare, nonzero, gather, zero": pipelines.torch_momentum},
            {ADD: within_passes},
            speedup=7.0,
        ),
        HotPath(
            "DGC with Nesterov's momentum",
            lambda o, job: momentum_masked(o, job, job.nesterov),
            {"torch add, mul, add, add, abs, compare, …, zero": pipelines.torch_nesterov},
            {ADD: Limit(MOMENTUM_SHARE)},
        ),
        HotPath(
            "DGC with exact top-k",
            momentum_topk_masked,
            {"torch mul, add, add, abs, topk, gather, zero": pipelines.torch_momentum_topk},
            {ADD: Limit(MOMENTUM_SHARE)},
        ),
        HotPath(
            "DRAGONN: hash to 4k slots", hashed(4, 1), hashing, {ADD: Limit(), SELECT: not_slower}
        ),
        HotPath(
            "DRAGONN: hash to 2k slots by 8",
            hashed(2, 8),
            hashing,
            {ADD: Limit(), SELECT: not_slower},
        ),
        HotPath(
            "ExDyna: select in a quarter",
            lambda o, job: o.partition_select(job.plain, job.threshold, *job.partition),
            {"torch add, abs, compare, nonzero, gather, zero": pipelines.torch_partition},
            {ADD: Limit()},
        ),
        HotPath(
            f"top-k of every {GROUP_NUMEL}",
            lambda o, job: o.accumulate_group_topk(job.plain, job.group_k, GROUP_NUMEL),
            {"torch add, abs, topk by row, gather, scatter": pipelines.torch_group},
            {ADD: Limit()},
        ),
        HotPath(
            "sampled threshold",
            sampled_threshold,
            {"torch strided add, abs, topk": pipelines.torch_sampled_threshold},
            {SELECT: Limit(factor=0.15, everywhere=True)},
        ),
        HotPath(
            "take at k indices",
            lambda o, job: o.take_at(job.residual, job.indices),
            {"torch gather, zero": pipelines.torch_take_at},
        ),
    ]
