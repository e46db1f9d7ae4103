"""Which tensors are exchanged together, in which order; agreed on by all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from hvd_sparse.collectives import Collective
from hvd_sparse.errors import PlanError
from hvd_sparse.selectors import Selector
from hvd_sparse.transports import Transport


@dataclass(frozen=True)
class TensorSpec:
    """What ranks must agree on about a gradient.

    Attributes:
        name: The parameter's name.
        shape: Its shape.
        dtype: Its gradient's type, as `torch.float32` is spelled.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Method:
    """How buckets are compressed and exchanged.

    Attributes:
        density: k/n, in (0, 1].
        bucket_numel: Elements above which a bucket is closed; a larger tensor has its own.
        selector: Makes one bucket's selector.
        collective: Makes one bucket's collective, from the transport, numel and k.
        description: All of the above in words; ranks must have the same.
    """

    density: float
    bucket_numel: int
    selector: Callable[[], Selector]
    collective: Callable[[Transport, int, int], Collective]
    description: str

    def k(self, numel: int) -> int:
        """Entries wanted from a bucket of `numel` elements: at least one, where there is one."""
        return min(numel, max(1, round(self.density * numel)))


Plan = list[list[TensorSpec]]
"""The tensors of each bucket, buckets in the order of exchange."""


def form_buckets(arrivals: Sequence[TensorSpec], bucket_numel: int) -> Plan:
    """Group tensors of one type in the order of their arrival."""
    plan: Plan = []
    open_buckets: dict[str, list[TensorSpec]] = {}
    for spec in arrivals:
        bucket = open_buckets.get(spec.dtype)
        if bucket is None or sum(s.numel for s in bucket) + spec.numel > bucket_numel:
            bucket = open_buckets[spec.dtype] = []
            plan.append(bucket)
        bucket.append(spec)
    last_arrival = {spec.name: place for place, spec in enumerate(arrivals)}
    return sorted(plan, key=lambda bucket: last_arrival[bucket[-1].name])


def agree_on_plan(arrivals: Sequence[TensorSpec], method: Method, transport: Transport) -> Plan:
    """Rank 0's first order of arrival makes the plan; every rank checks that it can follow it.

    Raises:
        PlanError: On every rank, where any rank has other tensors or another method.
    """
    plan = form_buckets(arrivals, method.bucket_numel)
    mine = {
        "method": method.description,
        "plan": [[asdict(spec) for spec in bucket] for bucket in plan],
    }
    theirs = [
        json.loads(bytes(message.numpy()))
        for message in transport.allgather((_text(json.dumps(mine)),), channel="plan")
    ]
    for rank, other in enumerate(theirs):
        _check_same(theirs[0], other, rank)
    return [
        [TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"]) for spec in bucket]
        for bucket in theirs[0]["plan"]
    ]


def _text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _check_same(first: dict[str, object], other: dict[str, object], rank: int) -> None:
    if other["method"] != first["method"]:
        raise PlanError(
            f"ranks compress differently: rank 0 {first['method']}, rank {rank} {other['method']}"
        )
    tensors, others = _tensors(first), _tensors(other)
    for name in sorted(tensors.keys() | others.keys()):
        if tensors.get(name) != others.get(name):
            raise PlanError(
                f"ranks have different gradients for {name!r}: "
                f"rank 0 {tensors.get(name, 'none')}, rank {rank} {others.get(name, 'none')}"
            )


def _tensors(message: dict[str, object]) -> dict[str, str]:
    plan = message["plan"]
    assert isinstance(plan, list)
    return {
        spec["name"]: f"{spec['dtype']}{tuple(spec['shape'])}" for bucket in plan for spec in bucket
    }
