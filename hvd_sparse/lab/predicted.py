"""What `hvd-sparse plan` predicts: DRAGONN's equation (1), a step's timeline, a network's costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hvd_sparse.collectives.registry import COSTED, cost
from hvd_sparse.cost_model import PLAIN_BYTES, Link, WireBytes
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.errors import ConfigError
from hvd_sparse.planner.choose import Job
from hvd_sparse.planner.costs import REFERENCE_NUMEL, Line, MethodCosts, Place, Profile


@dataclass(frozen=True)
class Span:
    """When a job of a step begins and is done, from the first gradient on."""

    job: Job
    start_s: float
    stop_s: float


def schedule(jobs: Sequence[Job]) -> Iterator[Span]:
    """The jobs' times, one after the other."""
    time_s = 0.0
    for job in sorted(jobs, key=lambda job: job.ready_s):
        start_s = max(time_s, job.ready_s)
        time_s = start_s + job.seconds
        yield Span(job, start_s, time_s)


@dataclass(frozen=True)
class Verdict:
    """DRAGONN's equation (1) for one tensor: compress it where encode + decode < dense - sparse."""

    dense_s: float
    encode_s: float
    decode_s: float
    exchange_s: float

    @property
    def encode_decode_s(self) -> float:
        """The left side of the equation."""
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

    A tensor that shares a bucket of `bucket_numel` elements has its share of the fixed costs, and
    what it saves is its own part of Horovod's fused reduction.
    """
    if bucket_numel is None:
        encode_s, decode_s = costs.encode.at(numel), costs.decode.at(numel)
        return Verdict(profile.dense.at(numel), encode_s, decode_s, costs.exchange.at(numel))
    share = numel / bucket_numel
    encode_s, decode_s, exchange_s = (
        share * line.at(bucket_numel) for line in (costs.encode, costs.decode, costs.exchange)
    )
    return Verdict(profile.dense.per_element_s * numel, encode_s, decode_s, exchange_s)


def modelled(place: Place, link: Link, methods: Mapping[MethodId, MethodCosts]) -> Profile:
    """A profile of a network that is not there, by the cost model.

    Of `methods`, the measured costs of encoding and decoding count, not those of exchanges.

    Raises:
        ConfigError: A method's collective has no formula.
    """

    def line(algorithm: str, density: float, wire: WireBytes = PLAIN_BYTES) -> Line:
        if algorithm not in COSTED:
            raise ConfigError(f"the cost model has no formula for {algorithm!r}")
        numel, k = REFERENCE_NUMEL, max(1, round(density * REFERENCE_NUMEL))
        expected = cost(algorithm, place.world_size, numel, k, wire).expected
        fixed_s = expected.latency_s(link)
        return Line(fixed_s, (expected.seconds(link, wire) - fixed_s) / numel)

    with_exchange = {
        name: replace(c, exchange=line(c.collective, c.density, c.wire))
        for name, c in methods.items()
    }
    words = f"cost model: {link.alpha_s * 1e6:g} µs, {link.beta_s_per_byte * 1e9:g} ns/byte"
    return Profile(place, line("dense", 1.0), with_exchange, words)
