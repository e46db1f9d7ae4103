"""The one home of what waits to be sent: residuals, and the momenta that belong to them.

A tensor of the plan has them in its buckets. Those of any other tensor wait outside, by name:

* Between two plans all of them do, with what selectors and collectives go on from.
* A tensor that has become dense releases its residual over several steps. All of it at once would
  be many gradients in one: at density 0.001 a residual is some ten times as long as a gradient.
* A frozen tensor, one that requires no gradient any more, keeps them: they would move its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor

from hvd_sparse.engine.bucket import Bucket, Location
from hvd_sparse.engine.bucketing import Assignment, TensorSpec
from hvd_sparse.engine.state import EngineState, l1_of
from hvd_sparse.transports import Transport

RELEASED_SHARE = 0.5
"""Norm of what is released in a step, at most, in units of the norm of this rank's gradient."""


class Residuals:
    """This rank's residuals and momenta, in and outside of the buckets of a plan.

    Attributes:
        outside: What is in no bucket: under a plan, of dense and of frozen tensors; else all of it.
    """

    def __init__(self) -> None:
        self.outside = EngineState()
        self._is_strict = False
        self._buckets: Sequence[Bucket] = ()
        self._locations: Mapping[str, Location] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._released: dict[str, Tensor] = {}
        self._flushed: set[str] = set()

    # -- plans and states --------------------------------------------------------------------------

    def begin_plan(
        self, buckets: Sequence[Bucket], locations: Mapping[str, Location], transport: Transport
    ) -> None:
        """Move what the buckets' tensors have into them, or raise ConfigError; on all ranks."""
        self.outside = self.outside.restore(buckets, transport, self._is_strict)
        self._is_strict = False
        self._buckets, self._locations = buckets, locations
        self._specs |= {name: location.spec for name, location in locations.items()}

    def end_plan(self, transport: Transport | None) -> None:
        if self._buckets:
            self.outside = self.state(transport)
        self._buckets, self._locations = (), {}

    def state(self, transport: Transport | None) -> EngineState:
        """A copy of everything, without a step that has failed; other steps must be settled."""
        if not self._buckets:
            return self.outside.copy()
        for bucket in self._buckets:
            bucket.roll_back()
        return EngineState.of(self._buckets, self.outside, transport)

    def load(self, state: EngineState, strict: bool) -> None:
        """Replace everything by a state, which the next plan restores (`EngineState.restore`)."""
        self.outside, self._is_strict = state, strict

    @property
    def step(self) -> int:
        """Steps in which anything was exchanged, as warm-ups count them."""
        return max((bucket.step for bucket in self._buckets), default=self.outside.step)

    # -- all of it ---------------------------------------------------------------------------------

    @property
    def waiting_l1(self) -> float:
        """L1 norm of the residuals that are outside the buckets."""
        return l1_of(list(self.outside.residual.values()))  # any thread may ask

    @property
    def holds_any(self) -> bool:
        held = [*self.outside.residual.values(), *(b.memory.residual for b in self._buckets)]
        return any(bool(each.any()) for each in held)

    def rescale(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.memory.rescale(factor)
        for tensors in self.outside.by_kind().values():
            for tensor in tensors.values():
                tensor.mul_(factor).nan_to_num_()

    def forget(self, names: Collection[str]) -> float:
        planned = [
            self._locations[name].cut()["residual"] for name in names if name in self._locations
        ]
        return l1_of(planned) + self.outside.drop(names)

    @property
    def changed(self) -> set[str]:
        """The tensors of which the last step may have changed something."""
        return {*self._locations, *self._flushed}

    def settle(self, counts: bool, undone: Collection[str] = ()) -> None:
        """End a step: keep its changes and drop what it released, or take the step back.

        A step that counts is taken back for the tensors in `undone` alone.
        """
        for bucket in self._buckets:
            if counts:
                bucket.undo([slot for slot, s in enumerate(bucket.specs) if s.name in undone])
            else:
                bucket.roll_back()
        residual = self.outside.residual
        flushed = self._flushed.difference(undone) & self._released.keys() & residual.keys()
        for name in flushed if counts else ():
            part = self._released[name]
            if part is not residual[name]:
                residual[name] = torch.sub(residual[name], part, out=part)
                if residual[name].any():
                    continue
            del residual[name]
            self.outside.drop([name])  # and what belongs to it
        self._flushed.clear()
        self._released.clear()

    # -- dense tensors -----------------------------------------------------------------------------

    def leftover(self, name: str) -> Tensor | None:
        """What waits to be sent of a tensor that is in no bucket: float32, its shape; or None."""
        return self.outside.residual.get(name)

    def release(self, name: str, gradient: Tensor) -> Tensor | None:
        """The part of a leftover that is to be added to this rank's dense gradient, or None.

        Its norm is at most half the gradient's, so that a long residual takes several steps. With a
        float16 gradient it is the rounded sum minus the gradient, and the rest waits.
        """
        residual = self.leftover(name)
        if residual is None:
            return None
        norm, limit = norm_of(residual), RELEASED_SHARE * norm_of(gradient)
        # All of it also where the gradient is NaN, since that step will not count.
        part = residual * (limit / norm) if limit < norm else residual
        if gradient.dtype == torch.float16:
            own = gradient.contiguous().to(part)
            together = (own + part).half()
            part = torch.where(together.isfinite(), together - own, 0.0)
        self._released[name] = part
        return part

    def flushed(self, name: str) -> None:
        """Say that the released part was reduced in this step; it is dropped if the step counts."""
        self._flushed.add(name)

    @property
    def is_releasing(self) -> bool:
        return bool(self._flushed)

    # -- frozen tensors ----------------------------------------------------------------------------

    def hold(self, name: str, frozen: bool) -> None:
        """Move what a frozen tensor of the plan has out of its buckets, and back when it is thawed.

        The step of its buckets must not have begun.
        """
        if frozen == (name in self.outside.residual):
            return
        outside, location = self.outside.by_kind(), self._locations[name]
        if frozen:
            for kind, tensor in location.cut().items():
                outside[kind][name] = tensor
        else:
            location.put_in(
                {kind: each.pop(name) for kind, each in outside.items() if name in each}
            )

    # -- momenta between two plans -----------------------------------------------------------------

    def change_units(self, before: Assignment, after: Assignment) -> None:
        for name, tensor in self.outside.momentum.items():
            # In a new process the state alone tells of the tensor.
            spec = self._specs.get(name) or TensorSpec(name, tuple(tensor.shape), "torch.float32")
            was, will_be = momentum_unit(before, spec), momentum_unit(after, spec)
            if was != will_be:
                tensor.mul_(will_be / was)

    def take_momentum(
        self, shapes: Mapping[str, Sequence[int]], transport: Transport
    ) -> list[Tensor]:
        if not shapes:
            return []
        momentum = self.outside.momentum
        own = [
            momentum.pop(name, torch.zeros(shape, dtype=torch.float32, device="cpu"))
            for name, shape in shapes.items()
        ]
        flat = torch.cat([tensor.cpu().reshape(-1) for tensor in own])
        total = transport.allreduce_sum(flat, channel="momentum")
        parts = total.split([tensor.numel() for tensor in own])
        return [part.view(tensor.shape) for part, tensor in zip(parts, own, strict=True)]

    def give_momentum(self, name: str, share: Tensor) -> None:
        self.outside.momentum[name] = share
        self.outside.residual.setdefault(name, torch.zeros_like(share))

    def drop_idle_momentum(self, assignment: Assignment) -> None:
        """Drop momenta to which the assignment has no use, and that nobody has taken over."""
        momentum = self.outside.momentum
        for name in momentum.keys() & self._specs.keys():  # others stay: what they are is not known
            method = assignment.choice_of(self._specs[name]).method
            if method is None or not method.memory.momentum:
                del momentum[name]


def momentum_unit(assignment: Assignment, spec: TensorSpec) -> float:
    """The unit of a tensor's momentum by an assignment; see `MemoryOptions.momentum_unit`."""
    method = assignment.choice_of(spec).method
    return 1.0 if method is None else method.memory.momentum_unit


def norm_of(*tensors: Tensor) -> float:
    """L2 norm of tensors of one device together.

    Squares are summed in float32, and only if they overflow in float64, which takes 15 times as
    long.
    """
    norm = _norm_in(torch.float32, tensors)
    return norm if isfinite(norm) else _norm_in(torch.float64, tensors)


def _norm_in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> float:
    """The norm in sums of a type, or of the tensor's own type where that is wider."""
    types = (torch.promote_types(dtype, tensor.dtype) for tensor in tensors)
    norms = [torch.linalg.vector_norm(t, dtype=d) for t, d in zip(tensors, types, strict=True)]
    return float(torch.stack([norm.double() for norm in norms]).square().sum().sqrt())
