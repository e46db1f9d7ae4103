"""How long a step's reductions take, with what backward hides of it.

Model: gradients become ready one after the other while backward runs, at `ready_s`. Reductions, the
dense ones of Horovod and the sparse ones of the engine, share one resource (the network, or on one
host the cores) and are served in the order in which they become ready:

    finish = max(finish, ready_s) + seconds

Horovod fuses its dense tensors and the stand-ins of sparse ones, so that its fixed cost is there
once, at the end; a bucket is ready with its last tensor and has its own fixed cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_sparse.planner.profile import MethodCosts, Profile


@dataclass(frozen=True)
class Job:
    """Something to be reduced.

    Attributes:
        ready_s: When it can begin, from the first gradient on.
        seconds: How long it takes.
    """

    ready_s: float
    seconds: float


def finish_s(jobs: Sequence[Job], fixed_s: float) -> float:
    """When the last of the jobs is done."""
    time_s = 0.0
    for job in sorted(jobs, key=lambda job: job.ready_s):
        time_s = max(time_s, job.ready_s) + job.seconds
    return time_s + fixed_s


def dense_job(profile: Profile, numel: int, ready_s: float) -> Job:
    """A dense tensor's share of Horovod's fused allreduce."""
    return Job(ready_s, profile.dense.per_element_s * numel)


def bucket_job(costs: MethodCosts, numels: Sequence[int], ready_s: Sequence[float]) -> Job:
    """A bucket of tensors."""
    return Job(max(ready_s), costs.seconds(sum(numels)))


@dataclass(frozen=True)
class Verdict:
    """DRAGONN's equation (1) for one tensor alone.

    Attributes:
        dense_s: Its dense reduction.
        encode_decode_s: Encoding and decoding it.
        exchange_s: Its sparse exchange.
    """

    dense_s: float
    encode_decode_s: float
    exchange_s: float

    @property
    def sparse_s(self) -> float:
        """All of its sparse reduction."""
        return self.encode_decode_s + self.exchange_s

    @property
    def holds(self) -> bool:
        """Encode + decode < dense - sparse."""
        return self.encode_decode_s < self.dense_s - self.exchange_s


def verdict(profile: Profile, costs: MethodCosts, numel: int) -> Verdict:
    """Equation (1) of Wang et al., "DRAGONN" (ICML '22), with this profile's costs."""
    return Verdict(
        profile.dense.at(numel),
        costs.encode.at(numel) + costs.decode.at(numel),
        costs.exchange.at(numel),
    )
