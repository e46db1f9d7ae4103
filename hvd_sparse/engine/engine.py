"""The engine, as the training thread sees it: steps, plans, reports and state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvd_sparse.engine.account import Account, Observer
from hvd_sparse.engine.bucket import Bucket, Location, Phase, make_buckets
from hvd_sparse.engine.bucketing import (
    Assignment,
    Method,
    TensorSpec,
    agree_on_assignment,
    agree_on_plan,
)
from hvd_sparse.engine.exchange import decode
from hvd_sparse.engine.residuals import Residuals, momentum_unit
from hvd_sparse.engine.state import EngineState
from hvd_sparse.engine.stats import Stats, StepStats
from hvd_sparse.engine.worker import Worker
from hvd_sparse.errors import ConfigError, PlanError, warn
from hvd_sparse.hosts import Hosts
from hvd_sparse.transports import Transport


class Engine:
    """Takes gradients one by one, and gives the reduced ones back.

    One step is `submit` for every tensor, `result` for every tensor, and `settle`, once it is known
    whether the results were applied. An engine that is collected as garbage ends its background
    threads and closes its transport. An `assignment` is a `Method` where all tensors have the same;
    ranks may have different observers.

    Attributes:
        skipped_steps: Steps that were taken back, since their results were not applied.
        dropped_l1: L1 norm of the residuals that this rank dropped.
        lost_l1: L1 norm of the residuals of ranks that are gone, as far as a caller knows it.
        hosts: Two levels among the ranks, or None; to be set after `connect`, before a step.
        exponents_of: See `Bucket`; to be set before a step.
    """

    def __init__(self, assignment: Assignment, observer: Observer | None = None) -> None:
        self.assignment = assignment
        self._account = Account(observer)
        self.skipped_steps = 0
        self.dropped_l1 = self.lost_l1 = 0.0
        self.hosts: Hosts | None = None
        self.residuals = Residuals()
        self.exponents_of: Callable[[str], Tensor | None] = lambda name: None
        self._unsettled = False
        self._worker = Worker()
        weakref.finalize(self, self._worker.close).atexit = False  # the worker sees to it itself
        self._arrivals: dict[str, tuple[TensorSpec, Tensor, bool]] = {}  # the last: frozen or not
        self._spent: list[list[Tensor | None]] = []
        self._buckets: list[Bucket] = []
        self._locations: dict[str, Location] = {}
        self._results: dict[str, Tensor] = {}
        self._taken: dict[TensorSpec, bool] = {}  # asked for every tensor in every step
        self._waits = StepStats()  # of the step, before any bucket's result is asked for

    @property
    def scale(self) -> float | None:
        """Factor of the sums over the ranks; must be set before the first `result`."""
        return self._worker.scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self._worker.scale = scale

    @property
    def unit(self) -> float:
        """The loss scale that gradients are multiplied by, for clipping; 1 where there is none."""
        return self._worker.unit

    @unit.setter
    def unit(self, unit: float) -> None:
        self._worker.unit = unit

    @property
    def error(self) -> BaseException | None:
        """Why the step under way has failed, here or at a peer; None where it has not."""
        error, transport = self._worker.error, self._transport
        return error if error is not None or transport is None else transport.failure

    @property
    def _transport(self) -> Transport | None:
        return self._worker.transport

    @property
    def planned(self) -> bool:
        return bool(self._buckets)

    @property
    def compressed_steps(self) -> int:
        """Steps in which anything was exchanged, as warm-ups count them."""
        return self.residuals.step

    def expects(self, name: str) -> bool:
        """Whether there is no plan yet, or the tensor is in it."""
        return not self.planned or name in self._locations

    def awaits(self, spec: TensorSpec) -> bool:
        """Whether the plan has this very object; the caller need not ask anything else then."""
        location = self._locations.get(spec.name)
        return location is not None and location.spec is spec

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the assignment gives the tensor to the engine, and not to Horovod."""
        taken = self._taken.get(spec)
        if taken is None:
            taken = self._taken[spec] = self.assignment.choice_of(spec).method is not None
        return taken

    def method_of(self, name: str) -> Method | None:
        return self._locations[name].bucket.method if name in self._locations else None

    def corrects_momentum(self, name: str | None) -> bool:
        method = None if name is None else self.method_of(name)
        return method is not None and method.memory.momentum > 0

    def settle(self, undone: Collection[str] = ()) -> None:
        """Keep the last step, or take it back as if it had never been; between steps.

        A step that was not settled is settled when the first gradient of the next one is submitted.
        `undone` has the tensors whose results were not applied.
        """
        self._spent = []
        if not (self._unsettled or self.residuals.is_releasing):
            return
        self._unsettled = False
        counts = not undone or not self.residuals.changed <= set(undone)
        self.skipped_steps += not counts
        self.residuals.settle(counts, undone)

    def _settle_what_has_failed(self) -> None:
        """Settle; a step that has failed is given up before, since threads may still be at it."""
        if self.error is not None:
            self._give_up_plan()
        self.settle()

    def let_go(self) -> None:
        """Drop the last step's gradients on a background thread: freeing memory takes time."""
        spent, self._spent = self._spent, []
        self._worker.let_go(spent)

    def rescale(self, factor: float) -> None:
        """Multiply all residuals and momenta, as a loss scaler does gradients; between steps."""
        self._settle_what_has_failed()
        self.residuals.rescale(factor)

    def forget(self, names: Collection[str]) -> float:
        """Drop tensors' residuals and momenta; all ranks call this alike, between steps.

        Returns the L1 norm of the residuals that this rank dropped; `dropped_l1` counts it.
        """
        self.check_between_steps("forget()")
        self._settle_what_has_failed()
        lost = self.residuals.forget(names)
        self.dropped_l1 += lost
        return lost

    def reassign(self, assignment: Assignment) -> None:
        """Reduce by another assignment from the next step on; all ranks call this alike.

        Residuals stay with their tensors: one that becomes dense is released (`Residuals.release`).
        """
        self._give_up_plan()
        self.residuals.change_units(self.assignment, assignment)
        self.assignment = assignment
        if self._transport is not None:
            self._account.tell_plan(self._transport)  # the next step's follows, if it has buckets

    def take_momentum(self, shapes: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """Take over the momenta of tensors that have become dense, summed over the ranks.

        All ranks call this alike, after `reassign` and `agree`. The result is what heavy-ball SGD
        would have for the sum of gradients: float32, on the host.
        """
        assert self._transport is not None
        return self.residuals.take_momentum(shapes, self._transport)

    def give_momentum(self, spec: TensorSpec, share: Tensor) -> None:
        """Begin a tensor with a momentum, between `reassign` and the next step.

        `share` is this rank's part of what heavy-ball SGD has for the sum of gradients: float32.
        """
        self.residuals.give_momentum(spec.name, share * momentum_unit(self.assignment, spec))

    def tell_tried(self, trial: Mapping[str, Any]) -> None:
        transport = self._transport
        assert transport is not None
        self._account.tell(lambda observer: observer.tried(transport, trial))

    def agree(self) -> None:
        """Raise PlanError on every rank unless all have the same assignment; between steps."""
        assert self._transport is not None
        agree_on_assignment(self.assignment, self._transport)

    def connect(self, transport: Transport) -> None:
        """Use a transport from the next step on, with a new plan and the old residuals."""
        self.disconnect()
        self._worker.connect(transport)

    def disconnect(self) -> None:
        """Stop the background threads and close the transport; keep the state."""
        self._give_up_plan()
        self._account.disconnected()
        self._worker.close()
        self.hosts = None

    def _give_up_plan(self) -> None:
        self._end_dense_step()
        self._worker.stop()  # before the state is read, which it changes
        for bucket in self._buckets:
            bucket.lane.hand_back()
        self.settle()
        self.residuals.end_plan(self._transport)
        with self._worker.at_pause():
            self._account.end_plan()
        self._waits = StepStats()
        self._arrivals, self._buckets, self._locations, self._taken = {}, [], {}, {}
        self._results = {}

    # -- a step, seen from the training thread -----------------------------------------------------

    def begin_step(self) -> None:
        """Say that a step begins; else steps in which all is dense do not count."""
        self._end_dense_step()
        self.residuals.drop_idle_momentum(self.assignment)
        self._account.step_began = True

    def _end_dense_step(self) -> None:
        was_dense = not self._buckets and not self._arrivals
        self._account.end_dense_step(self._transport, was_dense=was_dense)

    def submit(self, spec: TensorSpec, gradient: Tensor, *, frozen: bool = False) -> None:
        """Hand in a gradient, `(*spec.shape)`; it must not change until `result` has returned.

        A frozen tensor's gradient is zeros; its residual and momentum stay what they are.
        """
        if self._unsettled:
            self.settle()
        if not self._buckets:
            self._arrivals[spec.name] = (spec, gradient, frozen)
            return
        location = self._locations[spec.name]
        former = location.spec
        if former is not spec and former != spec:
            raise PlanError(
                f"the gradient of {spec.name!r} changed from {former.dtype}{former.shape} to "
                f"{spec.dtype}{spec.shape}: after such a change, call "
                "compression.reassign(compression.method) on all ranks"
            )
        if frozen != (spec.name in self.residuals.outside.residual):  # asked without a call
            self.residuals.hold(spec.name, frozen)
        if location.whole is not None:
            for bucket, slot, part in location.parts(gradient):
                if bucket.put(slot, part):
                    self._worker.begin(bucket)
        elif location.bucket.put(location.slot, gradient):
            self._worker.begin(location.bucket)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a whole step's exchanges, if any are under way, for `timeout_s` at most."""
        with self._waits.timed("wait_s"):
            return self._worker.wait_for_all(timeout_s)

    def result(self, name: str) -> Tensor:
        """A view of a tensor's reduced gradient; see `results`."""
        return self.results(name)[name]

    def results(self, name: str) -> Mapping[str, Tensor]:
        """All reduced gradients, views, by name, `name` among them; waits for the whole step.

        Raises:
            TransportError: A peer is gone or did not answer.
            PlanError: Ranks disagree, or some tensors' gradients were not submitted.
            ConfigError: The gradient was given up since it was submitted.
        """
        if not self._buckets:
            if name not in self._arrivals:
                raise _given_up(name)
            self.plan()
        if any(bucket.is_begun for bucket in self._buckets):
            self._finish_step()
        return self._results

    def _finish_step(self) -> None:
        missing = [n for b in self._buckets if b.phase is Phase.COLLECTING for n in b.missing()]
        if missing and self.error is not None:
            raise self.error
        if missing:
            raise PlanError(f"no gradient came for {', '.join(dict.fromkeys(missing))}")
        late = [StepStats() for _ in self._buckets]
        for bucket, stats in zip(self._buckets, late, strict=True):
            with stats.timed("wait_s"):
                self._worker.wait_for(bucket, Phase.EXCHANGED)
            bucket.lane.hand_back()
        late[-1].wait_s += self._waits.wait_s
        late[-1].starts["wait_s"] -= self._waits.wait_s
        self._waits = StepStats()
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
        """Give up the step under way: its waits, here and at the peers, end with an error."""
        self._worker.fail(error)

    def plan(self) -> None:
        """Make the plan (`agree_on_plan`) once the first step is there; all ranks together."""
        if self._buckets or not self._arrivals:
            return
        if self._transport is None:  # a hook's close()
            raise _given_up(next(iter(self._arrivals)))
        arrivals = self._arrivals.values()
        devices = {spec.name: gradient.device for spec, gradient, _ in arrivals}
        specs = [spec for spec, *_ in arrivals]
        plan = agree_on_plan(specs, self.assignment, self._transport, devices)
        buckets, locations = make_buckets(plan, devices, self._transport, self.hosts)
        self.residuals.begin_plan(buckets, locations, self._transport)
        self._buckets, self._locations = buckets, locations
        self._results = {name: location.reduced for name, location in locations.items()}
        for bucket in buckets:
            bucket.exponents_of = self.exponents_of
        self._account.begin_plan(self._transport, buckets)
        for name, location in locations.items():
            _, gradient, frozen = self._arrivals[name]
            self.residuals.hold(name, frozen)
            for bucket, slot, part in location.parts(gradient):
                bucket.put(slot, part)
        for bucket in buckets:
            bucket.phase = Phase.READY
        self._arrivals = {}
        self._worker.start(buckets)

    # -- reports and state -------------------------------------------------------------------------

    def stats(self) -> Stats:
        """A snapshot of what was selected, sent and waited for, per bucket and step."""
        with self._worker.at_pause():
            return self._account.stats(
                self._transport,
                skipped_steps=self.skipped_steps,
                dropped_l1=self.dropped_l1,
                waiting_l1=self.residuals.waiting_l1,
                lost_l1=self.lost_l1,
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by parameter, and the state of selectors and collectives."""
        self.check_between_steps("state_dict()")
        self._settle_what_has_failed()
        return self.residuals.state(self._transport).as_dict()

    def check_between_steps(self, call: str) -> None:
        if self.error is None and any(b.phase is not Phase.COLLECTING for b in self._buckets):
            raise ConfigError(f"{call} must be called between steps, got a call within one")

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool = True,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Continue from a state; all ranks call this between the same steps.

        The next step makes a new plan and compares what the ranks have loaded.

        Args:
            state: What `state_dict()` returned.
            strict: Whether the state must be that of this rank in this world, and of one step on
                all ranks. Otherwise what belongs to another world size starts anew, and tensors
                that are not in `shapes` are dropped, with a warning and a count.
            shapes: The model's parameters; None: not known.

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
        self.residuals.load(restored, strict)
        if strangers:
            self.count_dropped(restored.drop(strangers), f"residuals of {', '.join(strangers)}")

    def count_dropped(self, l1: float, what: str) -> None:
        self.dropped_l1 += l1
        warn(f"dropped {what}: L1 norm {l1:g}")


def _given_up(name: str) -> ConfigError:
    return ConfigError(
        f"the gradient of {name!r} was given up, since close(), reassign() or load_state_dict() "
        "was called between backward() and step()"
    )
