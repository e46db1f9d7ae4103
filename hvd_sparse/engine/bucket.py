"""A bucket: tensors that are accumulated, selected from and exchanged as one vector."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.engine.bucketing import BucketPlan, Method, TensorSpec
from hvd_sparse.engine.lane import DeviceLane
from hvd_sparse.engine.staging import Stages
from hvd_sparse.engine.stats import BucketStats, StepStats
from hvd_sparse.hosts import Hosts
from hvd_sparse.memories import Preconditioned
from hvd_sparse.streams import SparseStream, Sum
from hvd_sparse.transports import Transport


class Phase(Enum):
    """How far a bucket's step has come."""

    COLLECTING = auto()
    """Gradients are missing; the last step's result is there until they have come."""
    READY = auto()
    """All gradients are there, and no thread has begun to select."""
    SELECTING = auto()
    """A thread accumulates gradients and selects entries."""
    SELECTED = auto()
    """The entries to send are there: their exchange is due, or under way."""
    EXCHANGED = auto()
    """The sum is there. Whether the step counts depends on all buckets."""

    @property
    def is_due(self) -> bool:
        """Whether there is work to do, or under way."""
        return self in (Phase.READY, Phase.SELECTING, Phase.SELECTED)


class Bucket:
    """One bucket's state over its flat vector, and the step under way in it.

    Under two levels the bucket accumulates, selects and exchanges one shard of the vector: that of
    this rank among those of its host.

    Attributes:
        specs: Its tensors, side by side in this order.
        inside: Exchanges inside this host; None: there is one level.
        shard: This rank's shard of the vector: all of it without two levels.
        step: Steps done; the position in the warm-up.
        decoded: `(n,)`, in the gradients' type: the reduced gradient. It is written again only
            after all of the bucket's next gradients have come.
        views: Each tensor's part of it, in the tensor's shape, which the optimizer sees.
        taken: The entries to send, between selection and exchange; else None.
        reduced: The step's result before it is decoded; else None.
        is_open: Whether the last step has changed the state, and nobody has said if it counts.
        exponents_of: Gives a preconditioned tensor's units by name, contiguous int8 `(*shape)`,
            another object for others; None: they are 1.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        method: Method,
        transport: Transport,
        device: torch.device,
        step: int = 0,
        hosts: Hosts | None = None,
        decoded: Tensor | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.starts = [0, *accumulate(spec.numel for spec in specs)]
        self.numel = self.starts[-1]
        self.method = method
        self.step = step
        self.selector = method.selector()
        self.hosts = hosts
        self.inside = None
        if hosts is not None:
            self.inside = hosts.exchange_of(self.numel, specs[0].dtype, device)
        self.shard = slice(0, self.numel) if self.inside is None else self.inside.shard
        numel = self.shard.stop - self.shard.start
        peers = transport if hosts is None else hosts.across
        if device.type == "cuda":
            peers.land_pinned()
        self.collective = method.collective(peers, numel, method.k(numel))
        self.stages = Stages(self.collective, self.selector, takes_all=self._is_alone)
        self.memory = method.memory.make(numel, device, peers.world_size)
        if decoded is None:
            decoded = ops.zero_vector(self.numel, specs[0].torch_dtype, device)
        self.decoded = decoded
        self.lane = DeviceLane(device)
        self.stats = BucketStats(
            names=tuple(spec.label for spec in specs),
            numel=self.numel,
            k=method.k(self.numel),
            compressor=method.name,
            wire=self.collective.wire.name,
        )
        self.step_stats = StepStats()
        self.phase = Phase.COLLECTING
        self.taken: SparseStream | None = None
        self.reduced: Sum | None = None
        parts = decoded.split([spec.numel for spec in specs])
        self.views = [x.view(s.shape) for x, s in zip(parts, specs, strict=True)]
        self.is_open = False
        self._before: tuple[int, dict[str, Any], dict[str, Any]] | None = None
        self.exponents_of: Callable[[str], Tensor | None] = lambda name: None
        self._exponents: dict[int, Tensor] = {}
        self._gradients: list[Tensor | None] = [None] * len(specs)
        self._copies: dict[int, Tensor] = {}
        self._step_gradients: list[Tensor] | None = None
        self._missing = set(range(len(specs)))

    @property
    def is_begun(self) -> bool:
        """Whether a gradient of the step has come, or its result is not taken yet."""
        return self.phase is not Phase.COLLECTING or len(self._missing) < len(self.specs)

    def missing(self) -> list[str]:
        pairs = zip(self.specs, self._gradients, strict=True)
        return [spec.name for spec, gradient in pairs if gradient is None]

    def put(self, slot: int, gradient: Tensor) -> bool:
        """Take a gradient, which must not change until the bucket is done; says whether all came.

        It needs no lock, though gradients of several devices come on a thread for each.
        """
        self.lane.expect()
        self._gradients[slot] = gradient
        self._missing.discard(slot)
        if self._missing:
            return False
        self.lane.hand_over()
        return True

    def k_of(self, numel: int) -> int:
        """Entries wanted of so many elements in the step that comes, or is under way."""
        return numel if self._is_alone else self.method.k(numel, self.step)

    @property
    def _is_alone(self) -> bool:
        """Whether this is the only host: its ranks' sum is exchanged with nobody."""
        return self.hosts is not None and self.hosts.grid.hosts == 1

    def gradients(self) -> list[Tensor]:
        """What the step accumulates: this rank's gradients, or its host's sum of the shard.

        Raises:
            TransportError: A rank of the host is gone or did not answer.
        """
        if self.inside is None:
            return self.contiguous_gradients()
        given = self._step_gradients or [g for g in self._gradients if g is not None]
        return [self.inside.reduce_scatter(given)]

    def open_step(self) -> None:
        """Remember what the step is about to change; the memory does so with its tensors."""
        if isinstance(self.memory, Preconditioned):
            self._follow_units(self.memory)
        self._before = (self.step, self.selector.state_dict(), self.collective.state_dict())
        self.is_open = True

    def _follow_units(self, memory: Preconditioned) -> None:
        """Take over the units that the optimizer has changed since the last step."""
        if memory.unit is None:
            self._exponents.clear()
        for slot, spec in enumerate(self.specs):
            exponents = self.exponents_of(spec.name)
            if exponents is not None and exponents is not self._exponents.get(slot):
                self._exponents[slot] = exponents
                start, stop = self._in_shard(slot)
                first = start + self.shard.start - self.starts[slot]
                memory.precondition(start, spec.of(exponents).view(-1)[first:][: stop - start])

    def roll_back(self) -> None:
        """Undo the last step, bit for bit, if it has begun."""
        if not self.is_open:
            return
        assert self._before is not None
        self.step, selector, collective = self._before
        self.selector.load_state_dict(selector)
        self.collective.load_state_dict(collective)
        self.memory.roll_back()
        self.is_open = False

    def undo(self, slots: Collection[int]) -> None:
        """Take the last step back for some of the tensors; it counts, as for other buckets."""
        if not self.is_open:
            return
        if len(slots) == len(self.specs):
            step = self.step
            self.roll_back()
            self.step = step
            return
        for slot in slots:
            self.memory.undo(*self._in_shard(slot))
        self.is_open = False

    def contiguous_gradients(self) -> list[Tensor]:
        """The step's gradients, each contiguous; strided ones are copied to memory that is kept."""
        if self._step_gradients is None:
            self._step_gradients = [self._contiguous(slot) for slot in range(len(self.specs))]
        return self._step_gradients

    def _contiguous(self, slot: int) -> Tensor:
        gradient = self._gradients[slot]
        assert gradient is not None
        if gradient.is_contiguous():
            return gradient
        if slot not in self._copies:
            contiguous = torch.contiguous_format
            self._copies[slot] = torch.empty_like(gradient, memory_format=contiguous)
        return self._copies[slot].copy_(gradient)

    def decoding_would_overwrite_gradients(self) -> bool:
        """Whether a gradient is still a view of the last result, as after zeroing it in place."""
        start = self.decoded.data_ptr()
        stop = start + self.decoded.numel() * self.decoded.element_size()
        return any(g is not None and start <= g.data_ptr() < stop for g in self._gradients)

    def end_exchange(self) -> None:
        """Record the statistics of a step whose sum is there."""
        self.stats.record(self.step_stats)
        # The selector's threshold, or the one that the ranks scale together in ExDyna's exchange.
        own = getattr(self.selector, "threshold", 0.0)
        self.stats.threshold = float(own or getattr(self.collective, "threshold", 0.0))
        self.stats.partition_nnz = tuple(getattr(self.collective, "selected", ()))
        self.step_stats = StepStats()
        self.phase = Phase.EXCHANGED

    def close_step(self) -> list[Tensor | None]:
        """Begin to collect the next gradients; returns the step's, for the caller to drop."""
        gradients, self._gradients = self._gradients, [None] * len(self.specs)
        self._missing.update(range(len(self.specs)))
        self._step_gradients = None
        self.phase = Phase.COLLECTING
        return gradients

    def split(self, flat: Mapping[str, Tensor]) -> Iterator[tuple[TensorSpec, dict[str, Tensor]]]:
        """Each tensor's part of vectors `(n,)`: views in its shape, by name."""
        for spec, (start, stop) in zip(self.specs, pairwise(self.starts), strict=True):
            yield spec, {name: each[start:stop].view(spec.shape) for name, each in flat.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The memory's state over the whole vector, `(n,)` by name: zero outside the shard."""
        held = self.memory.tensors()
        if self.inside is None:
            return held
        return {kind: _padded(t, self.shard.start, self.numel) for kind, t in held.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the memory's state by one like that of `tensors`, between steps.

        The ranks of a host do so together: what they bring is summed, and each keeps its shard.
        """
        if self.hosts is not None and self.inside is not None:
            inside = self.inside
            tensors = {name: self.hosts.shard_of(t, inside) for name, t in tensors.items()}
        self.memory.load(tensors)

    def take_out(self, slot: int) -> dict[str, Tensor]:
        """Take one tensor's part out of the memory: by kind, in its shape, zero elsewhere."""
        start, stop = self._in_shard(slot)
        spec, held = self.specs[slot], self.memory.take_out(start, stop)
        if self.inside is not None:
            offset = start + self.shard.start - self.starts[slot]
            held = {name: _padded(part, offset, spec.numel) for name, part in held.items()}
        return {name: part.view(spec.shape) for name, part in held.items()}

    def put_in(self, slot: int, parts: Mapping[str, Tensor]) -> None:
        """Add what `take_out` returned for the same tensor."""
        start, stop = self._in_shard(slot)
        offset = start + self.shard.start - self.starts[slot]
        mine = {name: part.view(-1)[offset : offset + stop - start] for name, part in parts.items()}
        self.memory.put_in(start, mine)

    def _in_shard(self, slot: int) -> tuple[int, int]:
        """Where the shard has elements of one tensor: from and to."""
        first, last = (
            min(max(at, self.shard.start), self.shard.stop) - self.shard.start
            for at in self.starts[slot : slot + 2]
        )
        return first, last

    def state_dict(self) -> dict[str, Any]:
        """Selector and collective; residuals are kept by parameter."""
        return {
            "names": list(self.stats.names),
            "kind": self._kind(),
            "selector": self.selector.state_dict(),
            "collective": self.collective.state_dict(),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state was written by a bucket of the same tensors and the same kind."""
        names = list(self.stats.names)
        return state["kind"] == self._kind() and list(state["names"]) == names

    def _kind(self) -> str:
        hosts = None if self.hosts is None else self.hosts.kind
        return json.dumps([self.method.id.to_json(), type(self.collective).__name__, hosts])


def _padded(part: Tensor, start: int, numel: int) -> Tensor:
    """A part of a vector that is zero elsewhere."""
    whole = part.new_zeros(numel)
    whole[start : start + part.numel()] = part
    return whole


class Location:
    """Where one tensor of a plan lies: in one bucket, or in parts in several.

    Attributes:
        slots: Each bucket that has rows of it, and which of the bucket's tensors they are; in the
            order of the rows. `bucket` and `slot` are the first of them.
        whole: The decoded gradient of a tensor that is cut; None: it is the bucket's view.
    """

    def __init__(self, slots: Sequence[tuple[Bucket, int]], whole: Tensor | None) -> None:
        self.slots = tuple(slots)
        self.bucket, self.slot = self.slots[0]
        self.spec = self.bucket.specs[self.slot].tensor
        self.whole = whole

    @property
    def reduced(self) -> Tensor:
        return self.bucket.views[self.slot] if self.whole is None else self.whole

    def parts(self, tensor: Tensor) -> Iterator[tuple[Bucket, int, Tensor]]:
        for bucket, slot in self.slots:
            yield bucket, slot, bucket.specs[slot].of(tensor)

    def cut(self) -> dict[str, Tensor]:
        """Take what the buckets hold of the tensor out of them: by kind, in the tensor's shape."""
        found = [bucket.take_out(slot) for bucket, slot in self.slots]
        return {
            kind: torch.cat([parts[kind].view(-1) for parts in found]).view(self.spec.shape)
            for kind in found[0]
        }

    def put_in(self, held: Mapping[str, Tensor]) -> None:
        for bucket, slot in self.slots:
            spec = bucket.specs[slot]
            bucket.put_in(slot, {kind: spec.of(tensor) for kind, tensor in held.items()})


def make_buckets(
    plans: Sequence[BucketPlan],
    devices: Mapping[str, torch.device],
    transport: Transport,
    hosts: Hosts | None,
) -> tuple[list[Bucket], dict[str, Location]]:
    """A plan's buckets, and where each of its tensors lies, by name.

    The buckets of a tensor that is cut decode into one gradient, side by side. `devices` has where
    the gradients are, by the tensors' names.
    """
    for device in {each for each in devices.values() if each.type == "cuda"}:
        ops.backend(device)  # which says now if it cannot be had
    buckets: list[Bucket] = []
    wholes: dict[str, Tensor] = {}
    slots: dict[str, list[tuple[Bucket, int]]] = {}
    for plan in plans:
        first, decoded = plan.specs[0], None
        device = devices[first.name]
        if first.whole is not None:
            if first.name not in wholes:
                vector = ops.zero_vector(first.tensor.numel, first.torch_dtype, device)
                wholes[first.name] = vector.view(first.tensor.shape)
            decoded = first.of(wholes[first.name]).view(-1)
        bucket = Bucket(plan.specs, plan.method, transport, device, decoded=decoded, hosts=hosts)
        buckets.append(bucket)
        for slot, spec in enumerate(plan.specs):
            slots.setdefault(spec.name, []).append((bucket, slot))
    return buckets, {name: Location(found, wholes.get(name)) for name, found in slots.items()}
