"""The engine: buckets that are exchanged by a background thread as their gradients arrive.

The first step is collected whole; its order of arrival on rank 0 becomes the plan. From then on
every rank exchanges the buckets in the plan's order, each as soon as its last gradient is there, so
that no two ranks ever wait for each other's other bucket.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.collectives import IndexUnion
from hvd_sparse.engine.bucket import Bucket, Phase
from hvd_sparse.engine.observer import COMPARED_PHASES, Observer
from hvd_sparse.engine.plan import (
    Assignment,
    BucketPlan,
    Method,
    TensorSpec,
    agree_on_assignment,
    agree_on_plan,
)
from hvd_sparse.engine.state import EngineState
from hvd_sparse.engine.stats import Stats, StepStats
from hvd_sparse.errors import PlanError
from hvd_sparse.transports import Context, Transport

COMPARISON_INTERVAL = 64
"""Steps from one comparison of the ranks' times to the next, where an observer asks for it."""


def exchange(bucket: Bucket) -> None:
    """One step of one bucket: accumulate, take, exchange, give back.

    Leaves the sum over the ranks in `bucket.reduced`. Where the exchange fails, all that was taken
    is back in the residual.
    """
    memory, collective = bucket.memory, bucket.collective
    collective.transport.context = Context(bucket.specs[0].name, bucket.step)
    stats, traffic = bucket.step_stats, collective.transport.traffic.snapshot()
    with stats.timed("accumulate_s"):
        gradients = bucket.staged_gradients()
    with stats.timed("select_s"):
        k = bucket.k
        collective.aim(k)
        taken = memory.take(gradients, bucket.selector, k, collective.scope())
    with stats.timed("exchange_s"):
        try:
            if isinstance(collective, IndexUnion):
                reduction = collective.reduce(taken.to("cpu"), memory.take_at)
            else:
                reduction = collective.reduce(taken.to("cpu"))
        except BaseException:
            memory.abandon()
            raise
        memory.give_back(reduction.returned.finite())
    bucket.reduced = reduction.reduced
    bucket.step += 1
    bucket.poisoned = not reduction.reduced.isfinite()

    spent = collective.transport.traffic.since(traffic)
    stats.nnz_selected, stats.nnz_applied = taken.nnz, reduction.reduced.nnz
    stats.messages_sent = spent.messages_sent
    stats.bytes_sent, stats.bytes_received = spent.bytes_sent, spent.bytes_received


def decode(bucket: Bucket, scale: float, stats: StepStats) -> None:
    """Write the reduced entries, times `scale`, and zeros elsewhere."""
    assert bucket.reduced is not None
    with stats.timed("decode_s"):
        reduced = bucket.reduced.times(scale).to(bucket.decoded.device)
        ops.decode(bucket.decoded, reduced.indices, reduced.values)
    bucket.reduced = None


def undo(buckets: Sequence[Bucket]) -> None:
    """Take back the step that a non-finite gradient anywhere has spoilt.

    The optimizer, or the loss scaler in front of it, sees the same non-finite gradients on every
    rank and skips the step; residuals are as if there had been none, as the weights are.
    """
    for bucket in buckets:
        bucket.memory.undo(bucket.staged_gradients())


class Engine:
    """Takes gradients one by one, and gives the reduced ones back.

    One step is: `submit` for every tensor, then `result` for every tensor.

    Args:
        assignment: How each tensor is reduced; a `Method` where that is the same for all.
        observer: Is told of plans and steps; ranks need not have one alike, rank 0's decides
            whether they compare their times.

    Attributes:
        scale: What sums over ranks are multiplied by; must be set before the first `result`.
    """

    def __init__(self, assignment: Assignment, observer: Observer | None = None) -> None:
        self.assignment = assignment
        self.observer = observer
        self.scale: float | None = None
        self._transport: Transport | None = None
        self._arrivals: dict[str, tuple[TensorSpec, Tensor]] = {}
        self._buckets: list[Bucket] = []
        self._places: dict[str, tuple[Bucket, int]] = {}
        self._taken: dict[TensorSpec, bool] = {}  # asked for every tensor in every step
        self._restored = EngineState()
        self._comparing = False
        self._compared = torch.zeros(len(COMPARED_PHASES), dtype=torch.float64)
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._num_threads = torch.get_num_threads()

    @property
    def planned(self) -> bool:
        """Whether the first step has made the plan."""
        return bool(self._buckets)

    def expects(self, name: str) -> bool:
        """Whether there is no plan yet, or the tensor is in it."""
        return not self.planned or name in self._places

    def takes(self, spec: TensorSpec) -> bool:
        """Whether the assignment gives the tensor to the engine, and not to Horovod."""
        taken = self._taken.get(spec)
        if taken is None:
            taken = self._taken[spec] = self.assignment.choice_of(spec).method is not None
        return taken

    def method_of(self, name: str) -> Method | None:
        """How a tensor of the plan is compressed; None for any other."""
        return self._places[name][0].method if name in self._places else None

    def leftover(self, name: str) -> Tensor | None:
        """What waits to be sent of a tensor that is in no bucket: float32, its shape; or None."""
        return self._restored.residual.get(name)

    def forget_leftover(self, name: str) -> None:
        """The leftover was reduced densely, and all ranks saw the finite result."""
        self._restored.residual.pop(name, None)

    def reassign(self, assignment: Assignment) -> None:
        """Reduce by another assignment from the next step on.

        To be called between steps, and by all ranks between the same ones. Residuals stay with
        their tensors; that of a tensor which now is dense becomes its `leftover`.
        """
        state = self._state()
        self._drop_plan()
        self._restored = state
        self.assignment = assignment
        if self.observer is not None and self._transport is not None:
            self.observer.planned(self._transport, ())  # the next step's, if it has any bucket

    def agree(self) -> None:
        """Check that all ranks have the same assignment; they call this together, between steps.

        Raises:
            PlanError: On every rank, where they have not.
        """
        assert self._transport is not None
        agree_on_assignment(self.assignment, self._transport)

    def connect(self, transport: Transport) -> None:
        """Use a transport from the next step on; the plan is made anew, residuals are kept."""
        self.disconnect()
        self._transport = transport

    def disconnect(self) -> None:
        """Stop the background thread and close the transport, if there are any; keep the state."""
        self._restored = self._state()
        self._drop_plan()
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def _drop_plan(self) -> None:
        with self._changed:
            self._stopping = True
            exchanging = any(bucket.phase is Phase.READY for bucket in self._buckets)
            self._changed.notify_all()
        if self._thread is not None:
            if exchanging:
                self._thread.join(timeout=0.1)
                if self._thread.is_alive() and self._transport is not None:
                    self._transport.abort()  # it waits for a peer in a step nobody will finish
            self._thread.join()
        self._thread = self._error = self.scale = None
        self._arrivals, self._buckets, self._places, self._taken = {}, [], {}, {}
        self._stopping = False

    # -- a step, seen from the training thread -----------------------------------------------------

    def submit(self, spec: TensorSpec, gradient: Tensor) -> None:
        """Hand in a gradient, `(*spec.shape)`; it must not change until `result` has returned."""
        with self._changed:
            if not self.planned:
                self._arrivals[spec.name] = (spec, gradient)
                return
            bucket, place = self._places[spec.name]
            if bucket.specs[place] != spec:
                raise PlanError(f"gradient changed from {bucket.specs[place]} to {spec}")
            bucket.put(place, gradient)
            if bucket.phase is Phase.READY:
                self._num_threads = torch.get_num_threads()
                self._changed.notify_all()

    def result(self, name: str) -> Tensor:
        """The reduced gradient of a tensor, a view; waits for the whole step.

        Raises:
            TransportError: A peer is gone or did not answer.
            PlanError: Ranks disagree, or not all tensors' gradients were submitted.
        """
        if not self.planned:
            self._make_plan()
        bucket, place = self._places[name]
        if bucket.phase is not Phase.COLLECTING or len(bucket.missing()) < len(bucket.specs):
            self._finish_step()
        return bucket.view(place)

    def _finish_step(self) -> None:
        missing = [n for b in self._buckets if b.phase is Phase.COLLECTING for n in b.missing()]
        if missing and self._error is None:
            raise PlanError(f"no gradient came for {', '.join(missing)}")
        late = [StepStats() for _ in self._buckets]
        for bucket, stats in zip(self._buckets, late, strict=True):
            with stats.timed("wait_s"):
                self._wait_for(bucket, Phase.EXCHANGED)
            bucket.lane.hand_back()
        if any(bucket.poisoned for bucket in self._buckets):
            undo(self._buckets)
        for bucket, stats in zip(self._buckets, late, strict=True):
            if bucket.reduced is not None:
                assert self.scale is not None
                decode(bucket, self.scale, stats)
            bucket.stats.amend(stats)
            bucket.close_step()
        if self._comparing and self._buckets[0].stats.steps % COMPARISON_INTERVAL == 0:
            self._compare_ranks()
        if self.observer is not None:
            self.observer.stepped(self._buckets)

    def _compare_ranks(self) -> None:
        """Gather what the phases took on every rank; the background thread is idle meanwhile."""
        assert self._transport is not None
        totals = self.stats().totals
        now = torch.tensor([getattr(totals, n) for n in COMPARED_PHASES], dtype=torch.float64)
        since, self._compared = now - self._compared, now
        messages = self._transport.allgather((since,), channel="compare")
        if self.observer is not None:
            self.observer.compared(torch.stack([m.view(torch.float64) for m in messages]))

    def _wait_for(self, bucket: Bucket, phase: Phase) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bucket.phase is phase or self._error is not None)
            if bucket.phase is not phase:
                assert self._error is not None
                raise self._error

    def fail(self, error: BaseException) -> None:
        """Give up on the step under way: its waits, here and at the peers, end with an error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        if self._transport is not None:
            self._transport.abort(error)

    def _make_plan(self) -> None:
        assert self._transport is not None
        specs = [spec for spec, _ in self._arrivals.values()]
        plan = agree_on_plan(specs, self.assignment, self._transport)
        self._buckets = [self._new_bucket(bucket_plan) for bucket_plan in plan]
        self._places = {
            spec.name: (bucket, place)
            for bucket in self._buckets
            for place, spec in enumerate(bucket.specs)
        }
        leftover = self._restored.restore(self._buckets, self._transport)
        self._restored = EngineState(leftover)
        self._comparing = self._rank_0_observes()
        self._compared.zero_()
        if self.observer is not None:
            self.observer.planned(self._transport, self._buckets)
        for name, (bucket, place) in self._places.items():
            bucket.put(place, self._arrivals[name][1])
        self._arrivals = {}
        self._thread = threading.Thread(target=self._run, name="hvd_sparse", daemon=True)
        self._thread.start()

    def _rank_0_observes(self) -> bool:
        assert self._transport is not None
        mine = torch.tensor([self.observer is not None], dtype=torch.int64)
        return bool(self._transport.broadcast((mine,), 0, channel="observe").view(torch.int64))

    def _new_bucket(self, plan: BucketPlan) -> Bucket:
        assert self._transport is not None
        device = self._arrivals[plan.specs[0].name][1].device
        return Bucket(plan.specs, plan.method, self._transport, device)

    # -- the background thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                for bucket in self._buckets:
                    if not self._wait_until_ready(bucket):
                        return
                    with bucket.lane.work():
                        exchange(bucket)
                        overwrites = bucket.decoding_would_overwrite_gradients()
                        if self.scale is not None and not overwrites:
                            decode(bucket, self.scale, bucket.step_stats)
                    with self._changed:
                        bucket.stats.record(bucket.step_stats)
                        bucket.step_stats = StepStats()
                        bucket.phase = Phase.EXCHANGED
                        self._changed.notify_all()
        except BaseException as error:
            self.fail(error)

    def _wait_until_ready(self, bucket: Bucket) -> bool:
        """Wait for a bucket's gradients; false where there is no more to do."""
        with self._changed:
            self._changed.wait_for(
                lambda: bucket.phase is Phase.READY or self._stopping or self._error
            )
            if self._stopping or self._error:
                return False
        if torch.get_num_threads() != self._num_threads:  # a new thread does not inherit it
            torch.set_num_threads(self._num_threads)
        return True

    # -- reports and state -------------------------------------------------------------------------

    def stats(self) -> Stats:
        """What was selected, sent and waited for, per bucket and step."""
        transport = self._transport.name if self._transport is not None else ""
        return Stats(transport, [bucket.stats for bucket in self._buckets])

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, by parameter, and the state of selectors and collectives.

        To be called between steps.
        """
        return self._state().as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; what belongs to another world size or bucket starts anew.

        To be called between steps, and by all ranks between the same ones: the next step makes the
        plan anew.

        Raises:
            ConfigError: The state is not one that `state_dict()` makes.
        """
        restored = EngineState.from_dict(state)
        self._drop_plan()
        self._restored = restored

    def _state(self) -> EngineState:
        if not self.planned:
            return self._restored
        return EngineState.of(self._buckets, self._restored.residual)
