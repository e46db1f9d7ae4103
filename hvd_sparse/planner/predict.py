"""How long a step's reductions take, with what backward hides of it.

Model: gradients become ready one after the other while backward runs, at `ready_s`. Reductions, the
dense ones of Horovod and the sparse ones of the engine, share one resource (the network, or on one
host the cores) and are served in the order in which they become ready:

    finish = max(finish, ready_s) + seconds

Horovod fuses its dense tensors and the stand-ins of sparse ones, so that its fixed cost is there
once, at the end; a bucket is ready with its last tensor and has its own fixed cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvd_sparse.planner.profile import MethodCosts, Profile


@dataclass(frozen=True)
class Job:
    """Something to be reduced.

    Attributes:
        ready_s: When it can begin, from the first gradient on.
        seconds: How long it takes.
        parts: What it consists of, by name and in seconds: encode, exchange, decode; none: dense.
        label: What it reduces.
    """

    ready_s: float
    seconds: float
    parts: tuple[tuple[str, float], ...] = ()
    label: str = ""


@dataclass(frozen=True)
class Span:
    """A job's time in a step.

    Attributes:
        job: The job.
        start_s: When it begins, from the first gradient on.
        stop_s: When it is done.
    """

    job: Job
    start_s: float
    stop_s: float


def schedule(jobs: Sequence[Job]) -> Iterator[Span]:
    """When each of the jobs has its turn."""
    time_s = 0.0
    for job in sorted(jobs, key=lambda job: job.ready_s):
        start_s = max(time_s, job.ready_s)
        time_s = start_s + job.seconds
        yield Span(job, start_s, time_s)


def finish_s(jobs: Sequence[Job], fixed_s: float) -> float:
    """When the last of the jobs is done."""
    time_s = 0.0
    for job in sorted(jobs, key=lambda job: job.ready_s):
        time_s = max(time_s, job.ready_s) + job.seconds
    return time_s + fixed_s


def dense_job(profile: Profile, numel: int, ready_s: float, label: str = "") -> Job:
    """A dense tensor's share of Horovod's fused allreduce."""
    return Job(ready_s, profile.dense.per_element_s * numel, label=label)


def bucket_job(
    costs: MethodCosts, numels: Sequence[int], ready_s: Sequence[float], label: str = ""
) -> Job:
    """A bucket of tensors."""
    numel = sum(numels)
    parts = tuple((name, getattr(costs, name).at(numel)) for name in PARTS)
    return Job(max(ready_s), sum(seconds for _, seconds in parts), parts, label)


PARTS = ("encode", "exchange", "decode")


@dataclass(frozen=True)
class Verdict:
    """DRAGONN's equation (1) for one tensor: compress it where encode + decode < dense - sparse.

    Attributes:
        dense_s: Its dense reduction.
        encode_s: Encoding it.
        decode_s: Decoding it.
        exchange_s: Its sparse exchange.
    """

    dense_s: float
    encode_s: float
    decode_s: float
    exchange_s: float

    @property
    def encode_decode_s(self) -> float:
        """The equation's left side."""
        return self.encode_s + self.decode_s

    @property
    def sparse_s(self) -> float:
        """All of its sparse reduction."""
        return self.encode_decode_s + self.exchange_s

    @property
    def holds(self) -> bool:
        """Encode + decode < dense - sparse."""
        return self.encode_decode_s < self.dense_s - self.exchange_s


def verdict(
    profile: Profile, costs: MethodCosts, numel: int, bucket_numel: int | None = None
) -> Verdict:
    """Equation (1) of Wang et al., "DRAGONN" (ICML '22), with this profile's costs.

    Args:
        profile: Has the dense costs.
        costs: The method's.
        numel: Elements of the tensor.
        bucket_numel: Those of the bucket that it shares: it then has its share of the fixed costs,
            and what it saves is its own part of Horovod's fused reduction. None: it is alone.
    """
    if bucket_numel is None:
        encode_s, decode_s = costs.encode.at(numel), costs.decode.at(numel)
        return Verdict(profile.dense.at(numel), encode_s, decode_s, costs.exchange.at(numel))
    share = numel / bucket_numel
    encode_s, decode_s, exchange_s = (
        share * line.at(bucket_numel) for line in (costs.encode, costs.decode, costs.exchange)
    )
    return Verdict(profile.dense.per_element_s * numel, encode_s, decode_s, exchange_s)
