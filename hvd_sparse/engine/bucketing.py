"""Which tensors are exchanged together, by which method and in which order.

An `Assignment` gives each tensor a `Choice`: Horovod reduces it densely, or a `Method` does, in a
bucket that may have a name. `form_buckets` groups tensors in the order of arrival, which is rank
0's for all ranks (`agree_on_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_sparse.collectives import Collective
from hvd_sparse.errors import PlanError
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.selectors import Selector
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json

Devices = Mapping[str, torch.device]  # where gradients are, by their tensors' names
WARMUP_KINDS = ("exponential", "linear", "constant")
CPU_BUCKET_NUMEL, CUDA_BUCKET_NUMEL = 1 << 23, 1 << 25
"""A bucket on a device costs the host milliseconds, and its elements cost the device next to
nothing: BERT-base's step on an H200, in 14 buckets or in 4, took 117 ms or 85."""
LEAST_CUT_NUMEL = 1 << 24
"""Smaller tensors are never cut, however small buckets are: each part costs messages of its own,
and selecting from so few elements takes no longer than these."""
STAGES = 4
"""Densities of an exponential warm-up, each for the same number of steps."""


@dataclass(frozen=True)
class Warmup:
    """Densities of the first steps: more is exchanged while gradients change fast.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887): over the first
    epochs density falls exponentially, 0.25, 0.0625, 0.0156, 0.004, down to the target. Dense first
    steps are this package's.

    Attributes:
        kind: "exponential": four densities from `density` on, in a constant ratio; "linear": from
            `density` to the target; "constant": `density`.
        steps: Steps of the warm-up.
        density: The first density, in (0, 1].
        dense_steps: Steps before the warm-up in which everything is exchanged.
    """

    kind: str = "exponential"
    steps: int = 0
    density: float = 0.25
    dense_steps: int = 0

    def density_at(self, step: int, target: float) -> float:
        """The density of step number `step`, from 0; never below the target."""
        if step < self.dense_steps:
            return 1.0
        step -= self.dense_steps
        if step >= self.steps or self.density <= target:
            return target
        if self.kind == "exponential":
            stage = step * STAGES // self.steps
            return float(self.density * (target / self.density) ** (stage / STAGES))
        if self.kind == "linear":
            return self.density + (target - self.density) * step / self.steps
        return self.density


ALIGNED_NUMEL = 4
"""Elements of float32 in 16 bytes, the unit that kernels load."""


@dataclass(frozen=True)
class TensorSpec:
    """What ranks must agree on about a gradient.

    Attributes:
        name: The parameter's name.
        shape: Its shape.
        dtype: Its gradient's type, written as `torch.float32`.
        whole: The tensor of which these are some rows; None: it is a whole tensor itself.
        start: The first of these rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: TensorSpec | None = None
    start: int = 0

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype

    @property
    def tensor(self) -> TensorSpec:
        return self.whole or self

    @property
    def label(self) -> str:
        """The name, with the rows of a part: `weight[0:512]`."""
        stop = self.start + self.shape[0] if self.whole else 0
        return f"{self.name}[{self.start}:{stop}]" if self.whole else self.name

    def of(self, tensor: Tensor) -> Tensor:
        """A view of its rows, out of a tensor in the shape of the whole one."""
        return tensor[self.start : self.start + self.shape[0]] if self.whole else tensor

    def cut(self, numel: int) -> list[TensorSpec]:
        """Equal parts of whole rows, of at most `numel` elements unless a row is longer."""
        rows = self.shape[0] if self.shape else 1
        parts = min(rows, -(-self.numel // numel))
        if parts <= 1:
            return [self]
        edges = pairwise(rows * i // parts for i in range(parts + 1))
        return [
            TensorSpec(self.name, (stop - start, *self.shape[1:]), self.dtype, self, start)
            for start, stop in edges
        ]


Option = bool | int | float | str | None


@dataclass(frozen=True)
class MethodId:
    """What a method is, as data: by this ranks, states, costs and plans know it."""

    name: str
    options: tuple[tuple[str, Option], ...] = field(default=(), hash=False)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options)])

    @property
    def short(self) -> str:
        """The name, the collective and the density, for a table."""
        shown = [pair for pair in self.options if pair[0] in ("collective", "density")]
        return str(MethodId(self.name, tuple(shown)))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "options": dict(self.options)}

    @staticmethod
    def from_json(data: Any) -> MethodId:
        """Read what `to_json` made; anything else raises TypeError, KeyError or ValueError."""
        return MethodId(str(data["name"]), tuple(data["options"].items()))


@dataclass(frozen=True)
class Method:
    """How buckets are compressed and exchanged.

    Attributes:
        density: k/n, in (0, 1].
        bucket_numel: Elements above which a bucket is closed; a larger tensor has its own. None:
            what suits the tensors' device.
        selector: Makes one bucket's selector.
        collective: Makes one bucket's collective, from the transport, numel and k.
        name: What the compressor is called.
        memory: How gradients enter the accumulator.
        warmup: Densities of the first steps.
        summary: What a user set, for a reader.
        options: Everything above as data; with the name, ranks must have the same.
    """

    density: float
    bucket_numel: int | None
    selector: Callable[[], Selector]
    collective: Callable[[Transport, int, int], Collective]
    name: str
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    warmup: Warmup = field(default_factory=Warmup)
    summary: str = ""
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def id(self) -> MethodId:
        return MethodId(self.name, self.options)

    @property
    def description(self) -> str:
        return str(self.id)

    def k(self, numel: int, step: int | None = None) -> int:
        """Entries wanted from a bucket of `numel` elements: at least one, where there is one.

        Without a `step` it is what is wanted after the warm-up.
        """
        density = self.density
        if step is not None:
            density = self.warmup.density_at(step, density)
        return min(numel, max(1, round(density * numel)))

    def bucket_numel_on(self, device: torch.device | None = None) -> int:
        """Elements above which a bucket is closed on a device, or on a CPU."""
        is_cuda = device is not None and device.type == "cuda"
        return self.bucket_numel or (CUDA_BUCKET_NUMEL if is_cuda else CPU_BUCKET_NUMEL)

    @property
    def clip_norm(self) -> float | None:
        """Limit on the norm of the whole gradient that the optimizer sees; None: none."""
        return self.memory.clip_norm

    def choice_of(self, spec: TensorSpec) -> Choice:
        return Choice(self)


@dataclass(frozen=True)
class Choice:
    """How one tensor is reduced.

    A `method` of None leaves it to Horovod, densely. Tensors of one method, type and bucket name
    are exchanged as one vector; the empty name leaves it to `bucket_numel`.
    """

    method: Method | None
    bucket: str = ""


class Assignment(Protocol):
    """Says of every tensor how it is reduced; ranks must have the same."""

    @property
    def description(self) -> str:
        """What it says, in words that differ where two assignments do."""

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor is reduced; always the same answer for the same tensor."""


@dataclass(frozen=True)
class BucketPlan:
    """One bucket to be: tensors of one type, side by side in this order, or a part of one."""

    specs: tuple[TensorSpec, ...]
    method: Method


def form_buckets(
    arrivals: Sequence[TensorSpec], assignment: Assignment, devices: Devices | None = None
) -> list[BucketPlan]:
    """Group tensors of one type, device, method and bucket name in the order of their arrival.

    Within a bucket, tensors that would misalign those behind them come last.
    """
    devices = {} if devices is None else devices
    groups: list[list[TensorSpec]] = []
    methods: list[Method] = []
    open_groups: dict[tuple[object, ...], list[TensorSpec]] = {}
    for spec in arrivals:
        choice = assignment.choice_of(spec)
        assert choice.method is not None
        device = devices.get(spec.name)
        most = choice.method.bucket_numel_on(device)
        key = (spec.dtype, device, choice.method.id, choice.bucket)
        if not choice.bucket and spec.numel > max(most, LEAST_CUT_NUMEL):
            open_groups.pop(key, None)
            parts = spec.cut(max(most, LEAST_CUT_NUMEL))
            groups += [[part] for part in parts]
            methods += [choice.method] * len(parts)
            continue
        group = open_groups.get(key)
        full = (
            group is not None
            and not choice.bucket
            and sum(s.numel for s in group) + spec.numel > most
        )
        if group is None or full:
            group = open_groups[key] = []
            groups.append(group)
            methods.append(choice.method)
        group.append(spec)
    last_arrival = {spec.name: place for place, spec in enumerate(arrivals)}
    order = sorted(range(len(groups)), key=lambda i: last_arrival[groups[i][-1].name])
    return [
        BucketPlan(tuple(sorted(groups[i], key=lambda s: s.numel % ALIGNED_NUMEL != 0)), methods[i])
        for i in order
    ]


def agree_on_assignment(assignment: Assignment, transport: Transport) -> None:
    """Raise PlanError on every rank unless all have one assignment, before any exchange."""
    _exchanged(assignment, [], transport, "assignment")


def agree_on_plan(
    arrivals: Sequence[TensorSpec], assignment: Assignment, transport: Transport, devices: Devices
) -> list[BucketPlan]:
    """The buckets in the order of exchange, by rank 0's order of arrival; all ranks make them.

    Raises:
        PlanError: On every rank, if any rank has other tensors or treats them otherwise.
    """
    plan = form_buckets(arrivals, assignment, devices)
    places = list(dict.fromkeys(devices[name] for name in sorted(devices)))
    at = {name: f"{device.type}:{places.index(device)}" for name, device in devices.items()}
    told = [
        {"method": bucket.method.id.to_json(), "specs": [_told(s, at) for s in bucket.specs]}
        for bucket in plan
    ]
    first = _exchanged(assignment, told, transport, "plan")
    methods = {bucket.method.id: bucket.method for bucket in plan}
    specs = {spec.label: spec for bucket in plan for spec in bucket.specs}  # rank 0's, as checked
    return [
        BucketPlan(
            tuple(specs[s["name"]] for s in bucket["specs"]),
            methods[MethodId.from_json(bucket["method"])],
        )
        for bucket in first
    ]


def _told(spec: TensorSpec, at: Mapping[str, str]) -> dict[str, Any]:
    """Devices have numbers among this rank's: other ranks may have others, with tensors alike."""
    place = at[spec.name]
    return {"name": spec.label, "shape": spec.shape, "dtype": spec.dtype, "place": place}


def _exchanged(
    assignment: Assignment, plan: list[dict[str, Any]], transport: Transport, channel: str
) -> list[dict[str, Any]]:
    """Exchange what each rank would do; all raise where it differs. Returns rank 0's plan."""
    of = assignment.id if isinstance(assignment, Method) else MethodId(assignment.description)
    mine = {"assignment": of.to_json(), "plan": plan}
    first, *others = gather_json(transport, mine, channel)
    for rank, other in enumerate(others, 1):
        _check_same(first, other, rank)
    return list(first["plan"])


def _check_same(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    if other["assignment"] != first["assignment"]:
        pair = (MethodId.from_json(each["assignment"]) for each in (first, other))
        mine, theirs = differing(*pair)
        raise PlanError(f"ranks compress differently: rank 0 {mine}, rank {rank} {theirs}")
    tensors, others, none = _tensors(first), _tensors(other), MethodId("none")
    for name in sorted(tensors.keys() | others.keys()):
        mine, theirs = differing(tensors.get(name, none), others.get(name, none))
        if mine != theirs:
            raise PlanError(
                f"ranks have different gradients for {name!r}: rank 0 {mine}, rank {rank} {theirs}"
            )


def differing(first: MethodId, second: MethodId) -> tuple[str, str]:
    """What differs in two identities: option values; all of it, where names differ."""
    mine, theirs = dict(first.options), dict(second.options)
    if first.name != second.name or mine.keys() != theirs.keys():
        return str(first), str(second)
    apart = [name for name in mine if mine[name] != theirs[name]]
    words = [" ".join(f"{name}={each[name]}" for name in apart) for each in (mine, theirs)]
    return words[0], words[1]


def _tensors(message: dict[str, Any]) -> dict[str, MethodId]:
    """Each tensor's type, shape and method, as one identity."""
    found = {}
    for bucket in message["plan"]:
        method = MethodId.from_json(bucket["method"])
        for spec in bucket["specs"]:
            place = f" on device {spec['place']}" * (spec["place"] != "cpu:0")
            name = f"{spec['dtype']}{tuple(spec['shape'])}{place} by {method.name}"
            found[spec["name"]] = MethodId(name, method.options)
    return found
