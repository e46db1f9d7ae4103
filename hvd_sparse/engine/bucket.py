"""A bucket: tensors that are accumulated, selected from and exchanged as one vector."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.engine.bucketing import Method, TensorSpec
from hvd_sparse.engine.lane import Lane
from hvd_sparse.engine.staging import Stage, Stages
from hvd_sparse.engine.stats import BucketStats, StepStats
from hvd_sparse.hosts import Hosts, ShardedSum
from hvd_sparse.streams import SparseStream, Sum
from hvd_sparse.transports import Transport


class Clips(Protocol):
    """Limits a bucket's gradients in place."""

    def apply(self, bucket: Bucket) -> None:
        """See `clipping.StepClipping`."""


class Phase(Enum):
    """How far a bucket's step has come."""

    COLLECTING = auto()
    """Gradients are awaited; the last step's result is there until then."""
    READY = auto()
    """All gradients are there, and nobody has begun to select."""
    SELECTING = auto()
    """Gradients are being accumulated, and entries selected."""
    SELECTED = auto()
    """The entries to send are there: their exchange is due, or under way."""
    EXCHANGED = auto()
    """The sum is there; whether the step counts is for all buckets to say."""

    @property
    def is_due(self) -> bool:
        """Whether there is work to do, or under way."""
        return self in (Phase.READY, Phase.SELECTING, Phase.SELECTED)


class Bucket:
    """The flat state of one bucket, and the step that is under way in it.

    Under two levels, what it accumulates, selects and exchanges is one shard of the vector: that of
    this rank among those of its host.

    Attributes:
        specs: Its tensors, side by side in this order.
        numel: n, elements of all of them.
        hosts: The two levels; None: all ranks are alike.
        inside: The bucket's exchange inside this host, or None.
        shard: What of the vector is here: all of it without two levels.
        method: How it is compressed and exchanged.
        step: Steps done; the position in the warm-up.
        stages: How it is exchanged at each density of the warm-up.
        memory: Error feedback over the whole bucket.
        lane: Where its exchanges run.
        decoded: `(n,)`, in the gradients' type: where the reduced gradient is written. The
            gradients that the optimizer sees are views of it, as of any flat gradient bucket; it
            is written again only after all of the bucket's next gradients have come.
        phase: How far the step has come.
        taken: The entries to send, between selection and exchange; else None.
        stage: How they are to be exchanged; else None.
        reduced: The step's result before it is decoded, then None again.
        poisoned: Whether the step's result is non-finite somewhere.
        is_open: Whether the last step has begun to change the bucket's state, and nobody has said
            yet whether it counts.
        clipping: What limits the step's gradients, with those of the other buckets; None: nothing.
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
        self.collective = method.collective(peers, numel, method.k(numel))
        self.stages = Stages(self.collective, self.selector, takes_all=self._is_alone)
        self.memory = method.memory.make(numel, device, peers.world_size)
        if decoded is None:
            dtype = getattr(torch, specs[0].dtype.removeprefix("torch."))
            decoded = ops.zero_vector(self.numel, dtype, device)
        self.decoded = decoded
        self.lane = Lane(device)
        names = tuple(spec.label for spec in specs)
        self.stats = BucketStats(
            names=names,
            numel=self.numel,
            k=method.k(self.numel),
            compressor=method.name,
            wire=self.collective.wire.name,
        )
        self.step_stats = StepStats()
        self.phase = Phase.COLLECTING
        self.taken: SparseStream | None = None
        self.stage: Stage | None = None
        self.reduced: Sum | ShardedSum | None = None
        self._views: list[Tensor] | None = None
        self.poisoned = False
        self.is_open = False
        self.clipping: Clips | None = None
        self._before: tuple[int, dict[str, Any], dict[str, Any]] | None = None
        self._gradients: list[Tensor | None] = [None] * len(specs)
        self._staged: dict[int, Tensor] = {}
        self._step_gradients: list[Tensor] | None = None
        self._missing = len(specs)

    @property
    def threshold(self) -> float:
        """Magnitude from which entries left in the last step; 0.0 where there is none.

        The selector's, or the one that the ranks scale together in the exchange (ExDyna).
        """
        own = getattr(self.selector, "threshold", 0.0)
        return float(own or getattr(self.collective, "threshold", 0.0))

    @property
    def is_begun(self) -> bool:
        """Whether a gradient of the step has come, or its result is not taken yet."""
        return self.phase is not Phase.COLLECTING or self._missing < len(self.specs)

    def missing(self) -> list[str]:
        """Names of the tensors whose gradients have not come."""
        pairs = zip(self.specs, self._gradients, strict=True)
        return [spec.name for spec, gradient in pairs if gradient is None]

    def put(self, place: int, gradient: Tensor) -> None:
        """Take note of a gradient; it must not change until the bucket is done."""
        self.lane.expect()
        if self._gradients[place] is None:
            self._missing -= 1
        self._gradients[place] = gradient
        if self._missing == 0:
            self.lane.hand_over()
        if self._missing == 0 and self.phase is Phase.COLLECTING:
            self.phase = Phase.READY

    @property
    def k(self) -> int:
        """Entries wanted in the step that comes, or is under way."""
        return self._k_of(self.numel)

    @property
    def shard_k(self) -> int:
        """Those that are wanted of the shard: all k without two levels."""
        return self._k_of(int(self.shard.stop - self.shard.start))

    def _k_of(self, numel: int) -> int:
        return numel if self._is_alone else self.method.k(numel, self.step)

    @property
    def _is_alone(self) -> bool:
        """Whether there is no other host: what the ranks of this one sum is exchanged no more."""
        return self.hosts is not None and self.hosts.grid.hosts == 1

    def gradients(self) -> list[Tensor]:
        """What is accumulated in the step: this rank's gradients, or its host's sum of the shard.

        Raises:
            TransportError: A rank of the host is gone or did not answer.
        """
        if self.inside is None:
            return self.staged_gradients()
        if self._step_gradients is None:
            return [self.inside.reduce_scatter([g for g in self._gradients if g is not None])]
        return [self.inside.reduce_scatter(self._step_gradients)]

    def open_step(self) -> None:
        """Keep what the step is about to change; the memory does so with its tensors."""
        self._before = (self.step, self.selector.state_dict(), self.collective.state_dict())
        self.is_open = True

    def roll_back(self) -> None:
        """Go back to what was before the last step, bit for bit, if that has begun."""
        if not self.is_open:
            return
        assert self._before is not None
        self.step, selector, collective = self._before
        self.selector.load_state_dict(selector)
        self.collective.load_state_dict(collective)
        self.memory.roll_back()
        self.is_open = False

    def staged_gradients(self) -> list[Tensor]:
        """The step's gradients, each contiguous; strided ones are copied to a place kept for it."""
        if self._step_gradients is None:
            self._step_gradients = [self._staged_gradient(i) for i in range(len(self.specs))]
        return self._step_gradients

    def _staged_gradient(self, place: int) -> Tensor:
        gradient = self._gradients[place]
        assert gradient is not None
        if gradient.is_contiguous():
            return gradient
        if place not in self._staged:
            self._staged[place] = torch.empty(
                gradient.shape, dtype=gradient.dtype, device=gradient.device
            )
        return self._staged[place].copy_(gradient)

    def decoding_would_overwrite_gradients(self) -> bool:
        """Whether a gradient is still a view of the last result, as after zeroing it in place."""
        start = self.decoded.data_ptr()
        stop = start + self.decoded.numel() * self.decoded.element_size()
        return any(g is not None and start <= g.data_ptr() < stop for g in self._gradients)

    def end_exchange(self) -> None:
        """The step's sum is there; its statistics count."""
        self.stats.record(self.step_stats)
        self.stats.threshold = self.threshold
        self.stats.partition_nnz = tuple(getattr(self.collective, "selected", ()))
        self.step_stats = StepStats()
        self.phase = Phase.EXCHANGED

    def close_step(self) -> list[Tensor | None]:
        """Let go of the step's gradients, and collect the next ones.

        Returns:
            The gradients: who lets go of them last gives their memory back.
        """
        gradients, self._gradients = self._gradients, [None] * len(self.specs)
        self._missing = len(self.specs)
        self._step_gradients = None
        self.phase = Phase.COLLECTING
        return gradients

    def view(self, place: int) -> Tensor:
        """The decoded gradient of one tensor; the same object in every step."""
        if self._views is None:
            parts = self.decoded.split([spec.numel for spec in self.specs])
            self._views = [x.view(s.shape) for x, s in zip(parts, self.specs, strict=True)]
        return self._views[place]

    def split(self, flat: Mapping[str, Tensor]) -> Iterator[tuple[TensorSpec, dict[str, Tensor]]]:
        """Each tensor's part of vectors `(n,)`: views in its shape, by name."""
        for spec, (start, stop) in zip(self.specs, pairwise(self.starts), strict=True):
            yield spec, {name: each[start:stop].view(spec.shape) for name, each in flat.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The memory's state over the whole vector, `(n,)` by name: zero outside the shard."""
        held = self.memory.tensors()
        return held if self.inside is None else {k: self._whole(t) for k, t in held.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a state in the place of this one, between steps; a host's ranks do so together.

        Args:
            tensors: Like those of `tensors`. What the ranks of a host bring is added up, and each
                keeps its shard.
        """
        if self.hosts is not None and self.inside is not None:
            inside = self.inside
            tensors = {name: self.hosts.shard_of(t, inside) for name, t in tensors.items()}
        self.memory.load(tensors)

    def take_out(self, place: int) -> dict[str, Tensor]:
        """Take what is here of one tensor out of the memory: by kind, in the tensor's shape."""
        start, stop = self._in_shard(place)
        spec, held = self.specs[place], self.memory.take_out(start, stop)
        if self.inside is not None:
            offset = start + self.shard.start - self.starts[place]
            held = {name: _padded(part, offset, spec.numel) for name, part in held.items()}
        return {name: part.view(spec.shape) for name, part in held.items()}

    def put_in(self, place: int, parts: Mapping[str, Tensor]) -> None:
        """Add what `take_out` returned for the same tensor."""
        start, stop = self._in_shard(place)
        offset = start + self.shard.start - self.starts[place]
        mine = {name: part.view(-1)[offset : offset + stop - start] for name, part in parts.items()}
        self.memory.put_in(start, mine)

    def _in_shard(self, place: int) -> tuple[int, int]:
        """Where one tensor lies in the shard, as far as it does."""
        first, last = (
            min(max(at, self.shard.start), self.shard.stop) - self.shard.start
            for at in self.starts[place : place + 2]
        )
        return first, last

    def _whole(self, part: Tensor) -> Tensor:
        return _padded(part, self.shard.start, self.numel)

    def state_dict(self) -> dict[str, Any]:
        """Selector and collective; residuals are kept by parameter."""
        return {
            "names": list(self.stats.names),
            "kind": self._kind(),
            "selector": self.selector.state_dict(),
            "collective": self.collective.state_dict(),
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state was written by a bucket of the same tensors and the same kind.

        Earlier releases wrote the kind in words.
        """
        by, on = type(self.collective).__name__, "" if self.hosts is None else self.hosts.kind
        words = f"{self.method.description} by {by}" + f" on {on}" * bool(on)
        same_kind = state["kind"] in (self._kind(), words)
        return same_kind and list(state["names"]) == list(self.stats.names)

    def _kind(self) -> str:
        """The method, and what makes its exchanges: data, as text."""
        hosts = None if self.hosts is None else self.hosts.kind
        return json.dumps([self.method.id.to_json(), type(self.collective).__name__, hosts])


def _padded(part: Tensor, start: int, numel: int) -> Tensor:
    """A vector of zeros but for a part of it."""
    whole = part.new_zeros(numel)
    whole[start : start + part.numel()] = part
    return whole


# MERGED engine.location
# Where a tensor lies: in one bucket, or in parts in several.


class Location:
    """The places of one tensor of a plan.

    Attributes:
        spec: The tensor.
        places: Each bucket that has rows of it, and which of the bucket's tensors they are; in the
            order of the rows.
        bucket: The first of them.
        place: The tensor's, there.
        whole: The decoded gradient of a tensor that is cut; None: the bucket has it.
    """

    def __init__(
        self, spec: TensorSpec, places: Sequence[tuple[Bucket, int]], whole: Tensor | None
    ) -> None:
        self.spec = spec
        self.places = tuple(places)
        self.bucket, self.place = self.places[0]
        self.whole = whole

    def parts(self, tensor: Tensor) -> Iterator[tuple[Bucket, int, Tensor]]:
        """A tensor's rows for each bucket: views."""
        for bucket, place in self.places:
            yield bucket, place, bucket.specs[place].of(tensor)

    def cut(self) -> dict[str, Tensor]:
        """Take what the buckets hold of the tensor out of them: by kind, in the tensor's shape."""
        found = [bucket.take_out(place) for bucket, place in self.places]
        return {
            kind: torch.cat([parts[kind].view(-1) for parts in found]).view(self.spec.shape)
            for kind in found[0]
        }

    def put_in(self, held: Mapping[str, Tensor]) -> None:
        """Put back what `cut` returned."""
        for bucket, place in self.places:
            spec = bucket.specs[place]
            bucket.put_in(place, {kind: spec.of(tensor) for kind, tensor in held.items()})


class Wholes:
    """What tensors that are cut are decoded to, each its buckets' vectors side by side."""

    def __init__(self) -> None:
        self._gradients: dict[str, Tensor] = {}

    def vector_for(self, specs: Sequence[TensorSpec], device: torch.device) -> Tensor | None:
        """What a bucket of these is to decode to; None: a vector of its own."""
        [part, *_] = specs
        if part.whole is None:
            return None
        if part.name not in self._gradients:
            dtype = getattr(torch, part.dtype.removeprefix("torch."))
            vector = ops.zero_vector(part.tensor.numel, dtype, device)
            self._gradients[part.name] = vector.view(part.tensor.shape)
        return part.of(self._gradients[part.name]).view(-1)

    def locate(self, buckets: Iterable[Bucket]) -> dict[str, Location]:
        """Where each tensor of the buckets lies, by its name."""
        specs: dict[str, TensorSpec] = {}
        places: dict[str, list[tuple[Bucket, int]]] = {}
        for bucket in buckets:
            for place, spec in enumerate(bucket.specs):
                specs[spec.name] = spec.tensor
                places.setdefault(spec.name, []).append((bucket, place))
        wholes = self._gradients
        return {name: Location(specs[name], places[name], wholes.get(name)) for name in places}
