"""The planner: an assignment that rank 0 decides from measured costs, tries, and reviews.

Rank 0 alone decides, by its own costs and by all ranks' steps; it broadcasts what it decided, and
every rank follows. A rank that fails while planning aborts the transport, so that the others fail
as well, at once, and none trains by a plan that another does not have.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_sparse.engine.plan import Choice, Method, TensorSpec, text_tensor
from hvd_sparse.errors import HvdSparseError, PlanError
from hvd_sparse.planner.choose import (
    ChosenPlan,
    Placement,
    PlannedTensor,
    contenders,
    dense_plan,
    matched_to,
)
from hvd_sparse.planner.measure import DenseAllreduce, measure_profile
from hvd_sparse.planner.profile import Place, Profile, place_of
from hvd_sparse.planner.trial import (
    CONTENDERS,
    SETTLING_STEPS,
    TIMED_STEPS,
    Trial,
    Tried,
    slowest,
)
from hvd_sparse.transports import Transport

logger = logging.getLogger("hvd_sparse")

DENSE = Choice(None)
TRIAL_STEPS = SETTLING_STEPS + TIMED_STEPS
"""Steps by each plan of a trial."""
REVIEW_INTERVAL_STEPS = 500
"""Steps from one review to the next, once a trial is over."""
TOLERATED_ERROR = 0.25
"""Share by which a step may be off before the plan is made anew."""


class PlannableRules(Protocol):
    """An assignment that leaves some tensors to a planner; the same on all ranks."""

    @property
    def description(self) -> str:
        """See `Assignment.description`."""

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor without candidates is reduced."""

    def candidates_of(self, spec: TensorSpec) -> tuple[Method, ...]:
        """Methods of which the planner may choose one for the tensor, or dense."""


@dataclass(frozen=True)
class World:
    """What a planner measures with.

    Attributes:
        transport: Carries sparse exchanges.
        dense_allreduce: Horovod's allreduce.
    """

    transport: Transport
    dense_allreduce: DenseAllreduce


class Planner:
    """An assignment whose plannable tensors are decided in the world that trains them.

    Args:
        rules: Which tensors are plannable, and how all others are reduced.
        profile_path: A profile that `hvd-sparse profile` has saved; None: costs are measured when
            the ranks first meet.

    Attributes:
        profile: The costs that rank 0 goes by; on other ranks, what they measured themselves.
        plan: By what the ranks train; None before they have met.
        steps_to_review: Steps from the last decision to the next review.
        trial: Which plans were tried, and what they took; on rank 0 alone.
    """

    def __init__(
        self, rules: PlannableRules, profile_path: str | os.PathLike[str] | None = None
    ) -> None:
        self.rules = rules
        self.profile_path = profile_path
        self.profile: Profile | None = None
        self.plan: ChosenPlan | None = None
        self.steps_to_review = REVIEW_INTERVAL_STEPS
        self.trial: Trial | None = None
        self._methods: dict[str, Method] = {}

    # -- an assignment -----------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """See `Assignment.description`."""
        placed = {} if self.plan is None else self.plan.placements
        words = "; ".join(f"{name}: {p.method} in {p.bucket}" for name, p in sorted(placed.items()))
        return f"{self.rules.description}; planned: {words or 'all dense'}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        """See `Assignment.choice_of`; plannable tensors are dense until they are decided on."""
        if not self.rules.candidates_of(spec):
            return self.rules.choice_of(spec)
        placement = None if self.plan is None else self.plan.placements.get(spec.name)
        if placement is None:
            return DENSE
        return Choice(self._methods[placement.method], placement.bucket)

    # -- decisions, which all ranks take together --------------------------------------------------

    def decide(self, specs: Sequence[TensorSpec], world: World) -> None:
        """Measure, or read the profile; then all is dense until the first review.

        Args:
            specs: The model's tensors in the order in which their gradients may come.
            world: What to measure with.

        Raises:
            PlanError: On every rank, where rank 0 cannot plan.
            TransportError: Another rank failed.
        """
        self._methods = {
            method.description: method
            for spec in specs
            for method in self.rules.candidates_of(spec)
        }
        if not self._methods:
            self.plan = ChosenPlan({}, 0.0, 0.0)
            return
        with _aborting(world.transport):
            place = meet(world.transport)
            if self.profile_path is None:
                self.profile = measure_profile(
                    world.transport, world.dense_allreduce, self._methods, place
                )
            self._follow_rank_0(specs, world.transport, lambda: self._started(specs, place))

    def review(
        self,
        specs: Sequence[TensorSpec],
        ready_s: Mapping[str, float],
        timed: Tensor,
        transport: Transport,
    ) -> bool:
        """Go on with the trial, or begin another one where steps no longer take what they took.

        Args:
            specs: As in `decide`.
            ready_s: When gradients became ready in the last step, from the first one on.
            timed: This rank's last steps, float64 `(steps, 2)` in seconds; see `slowest`.
            transport: The world's.

        Returns:
            Whether the plan is another one.

        Raises:
            PlanError: As in `decide`.
            TransportError: As in `decide`.
        """
        if not self._methods:
            return False
        assert self.plan is not None
        before = dict(self.plan.placements)
        with _aborting(transport):
            ranks = transport.allgather((timed,), channel="review")
            steps = slowest([message.view(torch.float64).view(-1, 2) for message in ranks])
            self._follow_rank_0(specs, transport, lambda: self._reviewed(specs, ready_s, steps))
        return before != dict(self.plan.placements)

    def _follow_rank_0(
        self, specs: Sequence[TensorSpec], transport: Transport, decision: Callable[[], int]
    ) -> None:
        """Let rank 0 decide, which gives the steps to the next review; train by its plan."""
        message: dict[str, Any] = {}
        if transport.rank == 0:
            try:
                steps = decision()
                assert self.trial is not None
                message = {**asdict(self.trial.current.plan), "steps": steps}
            except (HvdSparseError, OSError) as error:
                message = {"error": str(error)}
        sent = transport.broadcast((text_tensor(json.dumps(message)),), 0, channel="planner")
        message = json.loads(bytes(sent.numpy()))
        if "error" in message:
            raise PlanError(f"rank 0 cannot plan: {message['error']}")
        placements = {name: Placement(**p) for name, p in message.pop("placements").items()}
        strangers = sorted(placements.keys() - {spec.name for spec in specs})
        if strangers:
            raise PlanError(f"rank 0 plans for {', '.join(strangers)}, which this rank has not")
        self.steps_to_review = message.pop("steps")
        self.plan = ChosenPlan(placements, **message)

    # -- rank 0 ------------------------------------------------------------------------------------

    def _started(self, specs: Sequence[TensorSpec], place: Place) -> int:
        if self.profile is None:
            assert self.profile_path is not None
            self.profile = Profile.load(self.profile_path).carried_over(place)
            if self.profile.source != "measured":
                logger.warning("the planner's costs were %s", self.profile.source)
        for name in self._methods:
            self.profile.costs_of(name)  # names what is missing before training begins
        return self._begin_trial(self._planned_tensors(specs, {}))

    def _reviewed(
        self,
        specs: Sequence[TensorSpec],
        ready_s: Mapping[str, float],
        steps: Sequence[tuple[float, float]],
    ) -> int:
        trial = self.trial
        assert trial is not None
        assert self.profile is not None
        tensors = self._planned_tensors(specs, ready_s)
        if trial.is_over:
            now = Tried(trial.winner.plan, list(steps))
            if not now.differs_from(trial.winner, TOLERATED_ERROR):
                return REVIEW_INTERVAL_STEPS
            logger.info("steps take %.3g s, not %.3g s", now.step_s, trial.winner.step_s)
            return self._begin_trial(tensors)
        first = len(trial.tried) == 1
        trial.record(steps)
        if first:
            dense = trial.tried[0]
            self.profile = matched_to(self.profile, tensors, dense.reduction_s)
            dense.plan = dense_plan(self.profile, tensors)
            trial.enter(contenders(self.profile, tensors, CONTENDERS))
        trial.go_on()
        if trial.is_over:
            logger.info("steps by the plans that were tried: %s", trial)
            return REVIEW_INTERVAL_STEPS
        return TRIAL_STEPS + (self._warmup_steps() if first else 0)

    def _begin_trial(self, tensors: Sequence[PlannedTensor]) -> int:
        assert self.profile is not None
        self.trial = Trial(dense_plan(self.profile, tensors))
        return TRIAL_STEPS

    def _planned_tensors(
        self, specs: Sequence[TensorSpec], ready_s: Mapping[str, float]
    ) -> list[PlannedTensor]:
        return [
            PlannedTensor(spec, ready_s.get(spec.name, 0.0), self.rules.candidates_of(spec))
            for spec in specs
        ]

    def _warmup_steps(self) -> int:
        """Steps after which every method has its own density; the first plan tried waits for it."""
        warmups = [method.warmup for method in self._methods.values()]
        return max(warmup.dense_steps + warmup.steps for warmup in warmups)


def meet(transport: Transport) -> Place:
    """Where the ranks are; host names tell how many hosts there are."""
    names = transport.allgather((text_tensor(socket.gethostname()),), channel="hosts")
    hosts = len({bytes(name.numpy()) for name in names})
    return place_of(transport.name, transport.world_size, hosts)


@contextmanager
def _aborting(transport: Transport) -> Iterator[None]:
    """Let the peers' waits fail where this rank does."""
    try:
        yield
    except BaseException:
        transport.abort()
        raise
