"""A bucket: tensors that are accumulated, selected from and exchanged as one vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.engine.lane import Lane
from hvd_sparse.engine.plan import Method, TensorSpec
from hvd_sparse.engine.staging import Stage, Stages
from hvd_sparse.engine.stats import BucketStats, StepStats
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

    Attributes:
        specs: Its tensors, side by side in this order.
        numel: n, elements of all of them.
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
        decoded: Tensor | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.starts = [0, *accumulate(spec.numel for spec in specs)]
        self.numel = self.starts[-1]
        self.method = method
        self.step = step
        self.selector = method.selector()
        self.collective = method.collective(transport, self.numel, method.k(self.numel))
        self.stages = Stages(self.collective, self.selector)
        self.memory = method.memory.make(self.numel, device, transport.world_size)
        if decoded is None:
            dtype = getattr(torch, specs[0].dtype.removeprefix("torch."))
            decoded = ops.zero_vector(self.numel, dtype, device)
        self.decoded = decoded
        self.lane = Lane(device)
        names = tuple(spec.label for spec in specs)
        self.stats = BucketStats(names=names, numel=self.numel, k=self.collective.k)
        self.step_stats = StepStats()
        self.phase = Phase.COLLECTING
        self.taken: SparseStream | None = None
        self.stage: Stage | None = None
        self.reduced: Sum | None = None
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
        self.lane.hand_over()
        if self._gradients[place] is None:
            self._missing -= 1
        self._gradients[place] = gradient
        if self._missing == 0 and self.phase is Phase.COLLECTING:
            self.phase = Phase.READY

    @property
    def k(self) -> int:
        """Entries wanted in the step that comes, or is under way."""
        return self.method.k(self.numel, self.step)

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
        return [list(state["names"]), state["kind"]] == [list(self.stats.names), self._kind()]

    def _kind(self) -> str:
        """The method, and what makes its exchanges."""
        return f"{self.method.description} by {type(self.collective).__name__}"
