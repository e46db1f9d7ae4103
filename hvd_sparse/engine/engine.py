"""The engine: buckets that a worker exchanges in the background as their gradients arrive.

The first step is collected whole; its order of arrival on rank 0 becomes the plan. From then on
every rank exchanges the buckets in the plan's order, each as soon as its last gradient is there, so
that no two ranks ever wait for each other's other bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_sparse.engine.account import Account, Observer, warn
from hvd_sparse.engine.bucket import Bucket, Location, Phase, Wholes
from hvd_sparse.engine.bucketing import (
    Assignment,
    BucketPlan,
    Method,
    TensorSpec,
    agree_on_assignment,
    agree_on_plan,
)
from hvd_sparse.engine.clipping import StepClipping
from hvd_sparse.engine.exchange import decode, work, work_ahead
from hvd_sparse.engine.state import EngineState
from hvd_sparse.engine.stats import Stats, StepStats
from hvd_sparse.engine.transitions import Frozen, Release, l1_of, momentum_unit
from hvd_sparse.engine.worker import Worker
from hvd_sparse.errors import ConfigError, PlanError
from hvd_sparse.hosts import Hosts
from hvd_sparse.transports import Transport


class Engine:
    """Takes gradients one by one, and gives the reduced ones back.

    One step is: `submit` for every tensor, `result` for every tensor, and `settle`, once it is
    known whether the results were applied. An engine that nobody refers to ends its background
    thread and closes its transport.

    Args:
        assignment: How each tensor is reduced; a `Method` where that is the same for all.
        observer: Is told of plans and steps. Every rank may have another one, or none; whether the
            ranks compare their times depends on rank 0's. One that raises is not called again.

    Attributes:
        skipped_steps: Steps that were taken back, since nobody applied their results.
        dropped_l1: L1 norm of residuals that were let go of, since a caller said so.
        lost_l1: L1 norm of residuals that went with other ranks, as far as a caller knows it.
        hosts: Two levels among the ranks, or None; to be set after `connect`, before a step.
    """

    def __init__(self, assignment: Assignment, observer: Observer | None = None) -> None:
        self.assignment = assignment
        self._account = Account(observer)
        self.skipped_steps = 0
        self.dropped_l1 = self.lost_l1 = 0.0
        self._unsettled = False
        self._release = Release()
        self._frozen = Frozen()
        self._freezing: set[str] = set()
        self._specs: dict[str, TensorSpec] = {}
        self._unit = 1.0
        self._clipping: StepClipping | None = None
        self.hosts: Hosts | None = None
        self._worker = Worker(work_ahead, work)
        weakref.finalize(self, self._worker.close).atexit = False  # the worker sees to it itself
        self._arrivals: dict[str, tuple[TensorSpec, Tensor]] = {}
        self._spent: list[list[Tensor | None]] = []
        self._buckets: list[Bucket] = []
        self._places: dict[str, Location] = {}
        self._taken: dict[TensorSpec, bool] = {}  # asked for every tensor in every step
        self._restored = EngineState()
        self._restored_strictly = False

    @property
    def scale(self) -> float | None:
        """What sums over ranks are multiplied by; must be set before the first `result`."""
        return self._worker.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._worker.scale = scale
        if self._clipping is not None:
            self._clipping.scale = scale

    @property
    def unit(self) -> float:
        """The loss scale that gradients are multiplied by, for clipping; 1 where there is none."""
        return self._unit

    @unit.setter
    def unit(self, unit: float) -> None:
        self._unit = unit
        if self._clipping is not None:
            self._clipping.unit = unit

    @property
    def error(self) -> BaseException | None:
        """What the step under way has failed by, here or at a peer; None where nothing has."""
        error, transport = self._worker.error, self._transport
        return error if error is not None or transport is None else transport.failure

    @property
    def at_rest(self) -> bool:
        """Whether nothing has failed, and no exchange is due or under way."""
        return self._worker.at_rest

    @property
    def _transport(self) -> Transport | None:
        return self._worker.transport

    @property
    def planned(self) -> bool:
        """Whether the first step has made the plan."""
        return bool(self._buckets)

    @property
    def compressed_steps(self) -> int:
        """Steps in which anything was exchanged, as warm-ups count them."""
        return max((bucket.step for bucket in self._buckets), default=self._restored.step)

    def expects(self, name: str) -> bool:
        """Whether there is no plan yet, or the tensor is in it."""
        return not self.planned or name in self._places

    def awaits(self, spec: TensorSpec) -> bool:
        """Whether just this tensor is in the plan; it needs no further question then."""
        location = self._places.get(spec.name)
        return location is not None and location.spec is spec

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the assignment gives the tensor to the engine, and not to Horovod."""
        taken = self._taken.get(spec)
        if taken is None:
            taken = self._taken[spec] = self.assignment.choice_of(spec).method is not None
        return taken

    def method_of(self, name: str) -> Method | None:
        """How a tensor of the plan is compressed; None for any other."""
        return self._places[name].bucket.method if name in self._places else None

    def leftover(self, name: str) -> Tensor | None:
        """What waits to be sent of a tensor that is in no bucket: float32, its shape; or None."""
        return self._restored.residual.get(name)

    def release(self, name: str, gradient: Tensor) -> Tensor | None:
        """What of a leftover is to be added to a dense gradient: float32, its shape; or None.

        At most half as long as the gradient, so that a long residual takes several steps.
        """
        leftover = self.leftover(name)
        return None if leftover is None else self._release.part(name, leftover, gradient)

    def flushed(self, name: str) -> None:
        """What was released was reduced in this step; it is let go where the step counts."""
        self._release.flushed(name)

    def settle(self, counts: bool | None = None, undone: Collection[str] = ()) -> bool:
        """Say whether the last step counts. Otherwise everything becomes what it was before it.

        To be called between steps. A step that nobody has settled is settled when the first
        gradient of the next one is submitted.

        Args:
            counts: Whether its results were applied; None: if all of them are finite.
            undone: Tensors whose results were not, where the step counts otherwise.

        Returns:
            Whether a step was taken back by this call.
        """
        self._spent = []
        if not (self._unsettled or self._release.is_due):
            return False
        self._unsettled = False
        if counts is None:
            counts = not any(bucket.poisoned for bucket in self._buckets)
        known = {*self._places, *self._release.names}
        if known and known <= set(undone):
            counts = False
        if not counts:
            self.skipped_steps += 1
        for bucket in self._buckets:
            if counts:
                bucket.undo([i for i, spec in enumerate(bucket.specs) if spec.name in undone])
            else:
                bucket.roll_back()
        self._release.settle(self._restored.residual, counts, undone)
        return not counts

    def let_go(self) -> None:
        """Let go of the last step's gradients, since nobody else refers to them any more.

        A background thread does it: giving the memory of large gradients back to the system takes
        milliseconds. Without this call `settle` does it.
        """
        spent, self._spent = self._spent, []
        self._worker.let_go(spent)

    def rescale(self, factor: float) -> None:
        """Multiply all residuals and momenta by a factor, between steps.

        They are in units of the gradients, which a loss scaler changes.
        """
        self.settle()
        for bucket in self._buckets:
            bucket.memory.rescale(factor)
        self._frozen.rescale(factor)
        for kept in (self._restored.residual, self._restored.momentum):
            for tensor in kept.values():
                tensor.mul_(factor)

    @property
    def holds_residuals(self) -> bool:
        """Whether anything waits to be sent."""
        held = [*self._restored.residual.values(), *(b.memory.residual for b in self._buckets)]
        return any(bool(each.any()) for each in held)

    def forget(self, names: Collection[str]) -> float:
        """Let go of residuals and momenta; to be called between steps, by all ranks alike.

        Returns:
            L1 norm of this rank's residuals that were let go of; `dropped_l1` counts it.

        Raises:
            ConfigError: A step is under way.
        """
        self.check_between_steps("forget()")
        self.settle()
        parts = []
        for name in names:
            if name in self._places:
                parts.append(self._places[name].cut())
            parts.append(self._frozen.held.pop(name, {}))
            kinds = {"residual": self._restored.residual, "momentum": self._restored.momentum}
            parts.append({kind: t.pop(name) for kind, t in kinds.items() if name in t})
        lost = l1_of(part["residual"] for part in parts if "residual" in part)
        self.dropped_l1 += lost
        return lost

    def reassign(self, assignment: Assignment) -> None:
        """Reduce by another assignment from the next step on.

        To be called between steps, and by all ranks between the same ones. Residuals stay with
        their tensors; that of a tensor which now is dense becomes its `leftover`.
        """
        self._give_up_plan()
        for name, tensor in self._restored.momentum.items():
            spec = self._spec_of(name, tensor)
            was, will_be = (momentum_unit(each, spec) for each in (self.assignment, assignment))
            if was != will_be:
                tensor.mul_(will_be / was)
        self.assignment = assignment
        if self._transport is not None:
            self._account.tell_plan(self._transport)  # the next step's follows, if it has buckets

    def take_momentum(self, shapes: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """The momenta of tensors that have none here any more, summed over the ranks.

        To be called after `reassign` and `agree`, by all ranks alike.

        Args:
            shapes: Of the tensors, by name.

        Returns:
            Float32 tensors on the host: what heavy-ball SGD would have for the sum of gradients.
        """
        if not shapes:
            return []
        assert self._transport is not None
        own = [self._restored.momentum.pop(name, torch.zeros(shapes[name])) for name in shapes]
        flat = torch.cat([tensor.cpu().reshape(-1) for tensor in own])
        total = self._transport.allreduce_sum(flat, channel="momentum")
        parts = total.split([tensor.numel() for tensor in own])
        return [part.view(tensor.shape) for part, tensor in zip(parts, own, strict=True)]

    def give_momentum(self, spec: TensorSpec, share: Tensor) -> None:
        """Begin with a momentum, between `reassign` and the next step.

        Args:
            spec: The tensor; the assignment gives it a momentum.
            share: This rank's part of what heavy-ball SGD has for the sum of gradients: float32.
        """
        self._restored.momentum[spec.name] = share * momentum_unit(self.assignment, spec)
        self._restored.residual.setdefault(spec.name, torch.zeros_like(share))

    def _drop_idle_momentum(self) -> None:
        """It ends where the assignment gives a tensor none, and nobody has taken it over."""
        momentum = self._restored.momentum
        for name in momentum.keys() & self._specs.keys():  # of others only the plan will tell
            method = self.assignment.choice_of(self._specs[name]).method
            if method is None or not method.memory.momentum:
                del momentum[name]

    def _spec_of(self, name: str, memory: Tensor) -> TensorSpec:
        """A tensor as it last was in a bucket; in a new process, as its memory looks."""
        return self._specs.get(name) or TensorSpec(name, tuple(memory.shape), str(torch.float32))

    def tell_tried(self, trial: Mapping[str, Any]) -> None:
        """Tell the observer what a planner tried and chose."""
        assert self._transport is not None
        self._account.tell_tried(self._transport, trial)

    def agree(self) -> None:
        """Check that all ranks have the same assignment; they call this together, between steps.

        Raises:
            PlanError: On every rank, where they have not.
        """
        assert self._transport is not None
        agree_on_assignment(self.assignment, self._transport)

    def connect(self, transport: Transport, hosts: Hosts | None = None) -> None:
        """Use a transport from the next step on; the plan is made anew, residuals are kept.

        Args:
            transport: Connects the ranks.
            hosts: Two levels among them; None: all ranks exchange with each other.
        """
        self.disconnect()
        self._worker.connect(transport)
        self.hosts = hosts

    def disconnect(self) -> None:
        """Stop the background thread and close the transport, if there are any; keep the state."""
        self._give_up_plan()
        self._account.disconnected()
        self._worker.close()
        self.hosts = None

    def _give_up_plan(self) -> None:
        """Stop the background thread, and keep the state for the next plan."""
        self._end_dense_step()
        self._worker.stop()  # before the state is read, which it changes
        self._restored = self._state()
        self._account.end_plan()
        self._frozen = Frozen()
        self._arrivals, self._buckets, self._places, self._taken = {}, [], {}, {}

    # -- a step, seen from the training thread -----------------------------------------------------

    def begin_step(self) -> None:
        """Say that a step begins; without this, steps of dense tensors only are not counted."""
        self._end_dense_step()
        self._drop_idle_momentum()
        self._account.begin_step()

    def _end_dense_step(self) -> None:
        was_dense = not self._buckets and not self._arrivals
        self._account.end_dense_step(self._transport, was_dense=was_dense)

    def submit(self, spec: TensorSpec, gradient: Tensor, *, frozen: bool = False) -> None:
        """Hand in a gradient, `(*spec.shape)`; it must not change until `result` has returned.

        Args:
            spec: The tensor.
            gradient: Its gradient; zeros where it is frozen.
            frozen: Whether its residual and momentum are to stay what they are.
        """
        if self._unsettled:
            self.settle()
        (self._freezing.add if frozen else self._freezing.discard)(spec.name)
        if not self._buckets:
            self._arrivals[spec.name] = (spec, gradient)
            return
        location = self._places[spec.name]
        former = location.spec
        if former is not spec and former != spec:
            raise PlanError(
                f"the gradient of {spec.name!r} changed from {former.dtype}{former.shape} to "
                f"{spec.dtype}{spec.shape}: after such a change, call "
                "compression.reassign(compression.method) on all ranks"
            )
        if frozen:
            self._frozen.freeze(spec.name, location)
        elif self._frozen.held:
            self._frozen.thaw(spec.name, location)
        if location.whole is None:
            self._worker.put(location.bucket, location.place, gradient)
            return
        for bucket, place, part in location.parts(gradient):
            self._worker.put(bucket, place, part)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the step is exchanged or has failed, but no longer than `timeout_s`.

        Returns:
            Whether that is so; at once where gradients are missing, and where there is no plan yet.
        """
        return self._worker.wait_for_all(timeout_s)

    def result(self, name: str) -> Tensor:
        """The reduced gradient of a tensor, a view; waits for the whole step.

        Raises:
            TransportError: A peer is gone or did not answer.
            PlanError: Ranks disagree, or not all tensors' gradients were submitted.
            ConfigError: The gradient was given up since it was submitted.
        """
        if not self._buckets:
            if name not in self._arrivals:
                raise ConfigError(
                    f"the gradient of {name!r} was given up, since reassign() or load_state_dict() "
                    "was called between backward() and step()"
                )
            self._make_plan()
        location = self._places[name]
        if location.bucket.is_begun:
            self._finish_step()
        whole = location.whole
        return location.bucket.view(location.place) if whole is None else whole

    def _finish_step(self) -> None:
        missing = [n for b in self._buckets if b.phase is Phase.COLLECTING for n in b.missing()]
        if missing and self.error is None:
            raise PlanError(f"no gradient came for {', '.join(dict.fromkeys(missing))}")
        late = [StepStats() for _ in self._buckets]
        for bucket, stats in zip(self._buckets, late, strict=True):
            with stats.timed("wait_s"):
                self._worker.wait_for(bucket, Phase.EXCHANGED)
            bucket.lane.hand_back()
        self._unsettled = True
        for bucket, stats in zip(self._buckets, late, strict=True):
            if bucket.reduced is not None:
                assert self.scale is not None
                decode(bucket, self.scale, stats)
            bucket.stats.amend(stats)
            self._spent.append(bucket.close_step())
        assert self._transport is not None
        self._account.end_step(self._transport)

    def fail(self, error: BaseException) -> None:
        """Give up on the step under way: its waits, here and at the peers, end with an error."""
        self._worker.fail(error)

    def _make_plan(self) -> None:
        assert self._transport is not None
        specs = [spec for spec, _ in self._arrivals.values()]
        plan = agree_on_plan(specs, self.assignment, self._transport)
        wholes = Wholes()
        buckets = [self._new_bucket(bucket_plan, wholes) for bucket_plan in plan]
        leftover = self._restored.restore(buckets, self._transport, self._restored_strictly)
        self._restored, self._restored_strictly = EngineState(leftover), False
        self._buckets = buckets
        self._places = wholes.locate(buckets)
        self._specs |= {name: location.spec for name, location in self._places.items()}
        self._account.begin_plan(self._transport, buckets)
        for name in self._freezing & self._places.keys():
            self._frozen.freeze(name, self._places[name])
        for name, location in self._places.items():
            for bucket, place, part in location.parts(self._arrivals[name][1]):
                bucket.put(place, part)
        self._arrivals = {}
        clipping = StepClipping(buckets, self._transport.world_size)
        clipping.scale, clipping.unit = self.scale, self._unit
        for bucket in buckets:
            bucket.clipping = clipping if clipping.is_on else None
        self._clipping = clipping
        in_order = any(b.inside is not None and b.inside.needs_order for b in buckets)
        self._worker.start(self._buckets, together=clipping.is_on, in_order=in_order)

    def _new_bucket(self, plan: BucketPlan, wholes: Wholes) -> Bucket:
        assert self._transport is not None
        device = self._arrivals[plan.specs[0].name][1].device
        decoded = wholes.vector_for(plan.specs, device)
        return Bucket(
            plan.specs, plan.method, self._transport, device, decoded=decoded, hosts=self.hosts
        )

    # -- reports and state -------------------------------------------------------------------------

    def stats(self) -> Stats:
        """What was selected, sent and waited for, per bucket and step: a snapshot."""
        waiting = [parts["residual"] for parts in self._frozen.held.values()]
        waiting += self._restored.residual.values()
        with self._worker.at_pause():
            return self._account.stats(
                self._transport,
                skipped_steps=self.skipped_steps,
                dropped_l1=self.dropped_l1,
                waiting_l1=l1_of(waiting),
                lost_l1=self.lost_l1,
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by parameter, and the state of selectors and collectives.

        Raises:
            ConfigError: A step is under way.
        """
        self.check_between_steps("state_dict()")
        state = self._state()
        return (state if self.planned else state.copy()).as_dict()

    def check_between_steps(self, call: str) -> None:
        """Refuse a call while a step is under way.

        Raises:
            ConfigError: One is.
        """
        if self.error is None and any(b.phase is not Phase.COLLECTING for b in self._buckets):
            raise ConfigError(f"{call} must be called between steps, got a call within one")

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool = True,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Continue from a state.

        To be called between steps, and by all ranks between the same ones: the next step makes the
        plan anew, and compares what the ranks have loaded.

        Args:
            state: What `state_dict()` returned.
            strict: Whether it must be that of this rank in this world, and of one step on all
                ranks. Otherwise what belongs to another world size starts anew, and tensors that
                are not in `shapes` are dropped, with a warning and a count.
            shapes: The parameters that there are; None: not known.

        Raises:
            ConfigError: The state is not one that `state_dict()` makes, or does not belong here.
        """
        restored = EngineState.from_dict(state)
        strangers = {} if shapes is None else restored.strangers(shapes)
        if strict:
            for name, why in strangers.items():
                raise ConfigError(f"state of the compression: residual of {name!r}: {why}")
            if self._transport is not None:
                restored.check_rank(self._transport)
        self._give_up_plan()
        self._restored, self._restored_strictly = restored, strict
        if strangers:
            self.count_dropped(restored.drop(strangers), f"residuals of {', '.join(strangers)}")

    def count_dropped(self, l1: float, what: str) -> None:
        """Warn of residuals that are let go of, and count them."""
        self.dropped_l1 += l1
        warn(f"dropped {what}: L1 norm {l1:g}")

    def _state(self) -> EngineState:
        self.settle()
        if not self.planned:
            self._restored.drop_orphans()
            return self._restored
        for bucket in self._buckets:
            bucket.roll_back()  # if it is in a step that nobody will finish
        state = EngineState.of(self._buckets, self._restored.residual, self._transport)
        self._frozen.add_to({"residual": state.residual, "momentum": state.momentum})
        return state
