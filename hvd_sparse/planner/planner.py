"""The planner: an assignment that rank 0 decides from measured costs, tries, reviews and remembers.

A rank that fails while planning aborts the transport, so that the others fail at once and no rank
trains by a plan that another does not have.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from hvd_sparse.engine.bucketing import Choice, Method, MethodId, TensorSpec
from hvd_sparse.errors import HvdSparseError, PlanError, logger, say, warn
from hvd_sparse.planner.choose import (
    ChosenPlan,
    Placement,
    TimedTensor,
    contenders,
    dense_plan,
    matched_to,
)
from hvd_sparse.planner.costs import Place, Profile, place_of
from hvd_sparse.planner.measure import LIMIT_S, DenseAllreduce, measure_profile
from hvd_sparse.planner.remembered import (
    Key,
    PlanCache,
    Remembered,
    TrialOutcome,
    placements_from_json,
    placements_to_json,
    plan_from_json,
    plan_to_json,
    recall,
)
from hvd_sparse.planner.trial import (
    CONTENDERS,
    TIMED_STEPS,
    TURN_STEPS,
    Took,
    Trial,
    lateness,
    slowest,
)
from hvd_sparse.streams import CPU
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json

if TYPE_CHECKING:  # the policy package needs pydantic, which a planner does not
    from hvd_sparse.policy.assignment import PolicyAssignment

DENSE = Choice(None)
REVIEW_INTERVAL_STEPS = 500
"""Steps from one review to the next, once a trial is over."""
RECALLED_REVIEW_STEPS = 50
"""Steps from a restart with a remembered plan to its first review."""
TOLERATED_ERROR = 0.25
"""Relative change of a step's time that starts another trial."""
TRIAL_SHARE = 0.10
"""Share of all steps that trials may take before another one begins."""


class Decision(TypedDict, total=False):
    """What rank 0 broadcasts, as plain containers; a key that is not there changes nothing.

    Attributes:
        error: Why rank 0 cannot plan.
        before: Placements in force until the ranks met.
        found: What is now remembered (`Remembered`).
        plan: The plan to train by; `steps` and `trying` come with it.
        steps: Steps to the next review.
        timed: How many of them are timed, the last ones; `TIMED_STEPS` if not given.
        trying: Whether a trial is under way.
    """

    error: str
    before: dict[str, Any]
    found: dict[str, Any]
    plan: dict[str, Any]
    steps: int
    timed: int
    trying: bool


@dataclass(frozen=True)
class FixedAssignment:
    """A planner's assignment at one moment: it stays the same when the planner decides anew.

    The rules say which tensors the planner decides on; it compresses those that have a placement.
    """

    rules: PolicyAssignment
    placements: Mapping[str, Placement]
    planner: Planner

    @property
    def description(self) -> str:
        """What ranks compare: the rules, and each compressed tensor."""
        words = "; ".join(
            f"{name}: {p.method} in {p.bucket}" for name, p in sorted(self.placements.items())
        )
        return f"{self.rules.description}; planned: {words or 'all dense'}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor is reduced: by its placement, or dense, where the planner decides on it."""
        candidates = self.rules.candidates_of(spec)
        if not candidates:
            return self.rules.choice_of(spec)
        placement = self.placements.get(spec.name)
        if placement is None:
            return DENSE
        found = next((m for m in candidates if m.id == placement.method), None)
        return DENSE if found is None else Choice(found, placement.bucket)


@dataclass(frozen=True)
class World:
    """What a planner measures with: a transport for sparse exchanges, a backend for dense ones."""

    transport: Transport
    dense_allreduce: DenseAllreduce
    device: torch.device = CPU
    backend: str = "horovod"


class Planner:
    """An assignment that decides on some tensors in the world that trains them.

    Args:
        rules: Which tensors the planner decides on, and how all others are reduced.
        profile_path: A profile saved by `hvd-sparse profile`; None: the ranks measure their costs
            when they first meet.
        cache: Keeps what was found for the next run, if given.

    Attributes:
        plan: The plan in force; None before the ranks have met.
        steps_to_review: Steps from the last decision to the next review.
        timed_steps: How many of them are timed, the last ones.
        is_trying: Whether a trial is under way. Residuals of tensors that are dense for a turn then
            wait for its end.
        trial: The plans tried, and their times; only on rank 0, in the run that tried them.
        outcome: The result of the last trial, this run's or a remembered one.
        before: Assignment in force before the ranks met; None once the caller has used it.
        compressed_steps: Steps that the warm-up has seen; the caller keeps it up to date.
    """

    def __init__(
        self,
        rules: PolicyAssignment,
        profile_path: str | os.PathLike[str] | None = None,
        cache: PlanCache | None = None,
    ) -> None:
        self.rules = rules
        self.profile_path = profile_path
        self.cache = cache
        self.profile: Profile | None = None
        self.plan: ChosenPlan | None = None
        self.steps_to_review, self.timed_steps = REVIEW_INTERVAL_STEPS, TIMED_STEPS
        self.is_trying = False
        self.trial: Trial | None = None
        self.outcome: TrialOutcome | None = None
        self.before: FixedAssignment | None = None
        self.compressed_steps = 0
        self._methods: dict[MethodId, Method] = {}
        self._key: Key | None = None
        self._found: dict[str, Any] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._steps = self._trial_steps = 0

    # -- an assignment -----------------------------------------------------------------------------

    @property
    def current(self) -> FixedAssignment:
        """The assignment in force."""
        return FixedAssignment(self.rules, {} if self.plan is None else self.plan.placements, self)

    @property
    def description(self) -> str:
        """That of the assignment in force."""
        return self.current.description

    def choice_of(self, spec: TensorSpec) -> Choice:
        """How a tensor is reduced; dense until the planner has decided on it."""
        return self.current.choice_of(spec)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs: the plan, the costs and the result of the trial."""
        if self._loaded is not None:
            return dict(self._loaded)  # the ranks have not met since
        return {"placements": placements_to_json(self.current.placements), "found": self._found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use a state's plan when the ranks meet next, if rank 0's key is the same."""
        self._loaded = dict(state)

    # -- decisions, which all ranks take together --------------------------------------------------

    def decide(self, specs: Sequence[TensorSpec], world: World) -> None:
        """Use the remembered plan; without one, measure, and train dense until the first review.

        Args:
            specs: The model's tensors in the expected order of their gradients.
            world: What to measure with.

        Raises:
            PlanError: On every rank, where rank 0 cannot plan.
            TransportError: Another rank failed.
        """
        self._methods = {
            method.id: method for spec in specs for method in self.rules.candidates_of(spec)
        }
        self._forget()
        if not self._methods:
            self.plan, self._loaded = ChosenPlan({}, 0.0, 0.0), None
            return
        transport = world.transport
        with _aborting(transport):
            place = meet(transport, world.device)
            self._follow_rank_0(
                specs, transport, lambda: self._recalled(specs, place, world.backend)
            )
            self._loaded = None
            if self.outcome is not None:
                return
            if self.profile is None and self.profile_path is None:
                self.profile = measure_profile(
                    *(transport, world.dense_allreduce, self._methods, place),
                    *(LIMIT_S, world.device, sum(spec.numel for spec in specs)),
                )
            self._follow_rank_0(specs, transport, lambda: self._started(specs, place))

    def review(
        self,
        specs: Sequence[TensorSpec],
        ready_s: Mapping[str, float],
        timed: Tensor,
        transport: Transport,
    ) -> bool:
        """Continue the trial, or begin another one if the time of a step has changed.

        Args:
            specs: As in `decide`.
            ready_s: Seconds from a step's first gradient to each one.
            timed: This rank's last steps, float64 `(steps, 3)` in seconds; see `slowest`.
            transport: The world's.

        Returns:
            Whether the plan has changed.

        Raises:
            PlanError: As in `decide`.
            TransportError: As in `decide`.
        """
        if not self._methods:
            return False
        before = dict(self.current.placements)
        with _aborting(transport):
            messages = transport.allgather((timed,), channel="review")
            ranks = [message.view(torch.float64).view(-1, 3) for message in messages]
            self._steps += self.steps_to_review
            self._trial_steps += min(self.steps_to_review, TURN_STEPS) * self.is_trying
            self._follow_rank_0(specs, transport, lambda: self._reviewed(specs, ready_s, ranks))
        return before != dict(self.current.placements)

    def _follow_rank_0(
        self, specs: Sequence[TensorSpec], transport: Transport, decide: Callable[[], Decision]
    ) -> None:
        """Let rank 0 decide, and apply its decision on every rank."""
        decision: Decision = {}
        if transport.rank == 0:
            try:
                decision = decide()
            except (HvdSparseError, OSError) as error:
                decision = {"error": str(error)}
        decision = gather_json(transport, decision, "planner")[0]
        if "error" in decision:
            raise PlanError(f"rank 0 cannot plan: {decision['error']}")
        if "found" in decision:
            self._found = decision["found"]
            found = Remembered.from_json(self._found)
            self.profile, self.outcome = found.profile, found.outcome
        if "before" in decision:
            placements = placements_from_json(decision["before"])
            self.before = FixedAssignment(self.rules, placements, self)
        if "plan" in decision:
            plan = plan_from_json(decision["plan"])
            if unknown := self._unknown(plan, specs):
                raise PlanError(f"rank 0 plans for {unknown}, which this rank has not")
            self.plan, self.is_trying = plan, decision["trying"]
            self.steps_to_review = decision["steps"]
            self.timed_steps = decision.get("timed", TIMED_STEPS)

    def _unknown(self, plan: ChosenPlan, specs: Sequence[TensorSpec]) -> str:
        """The tensors and methods of a plan that there are none of."""
        methods = {placement.method for placement in plan.placements.values()}
        unknown = plan.placements.keys() - {spec.name for spec in specs}
        return ", ".join(sorted(unknown | {str(m) for m in methods - self._methods.keys()}))

    def _forget(self) -> None:
        self.is_trying = False
        self.profile = self.outcome = None

    # -- rank 0 ------------------------------------------------------------------------------------

    def _recalled(self, specs: Sequence[TensorSpec], place: Place, backend: str) -> Decision:
        """What a state, this process or the cache remembers of this model in this world."""
        profile = ""
        if self.profile_path is not None:  # `Profile.load` says what is wrong with it
            profile = Path(self.profile_path).read_text("utf-8", errors="replace")
        self._key = Key.of(specs, f"{backend}: {self.rules.description}", profile, place)
        loaded = self._loaded or {}
        found = [] if self.cache is None else self.cache.read()
        # Always sent: a rank that has just joined moves momenta from where the others have them.
        decision: Decision = {"before": placements_to_json(self.current.placements)}
        try:
            if loaded:
                before = placements_from_json(loaded["placements"])
                decision["before"] = placements_to_json(before)
            for known in (self._found, loaded.get("found")):
                found += [Remembered.from_json(known)] if known else []
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            warn(f"the state's plan cannot be read, and is left out: {error}")
        remembered, why = recall(self._key, found)
        if remembered is None:
            if why:
                tell(f"the remembered plan is for another {why}; measuring again")
            return decision
        outcome = remembered.outcome
        if outcome is not None and (unknown := self._unknown(outcome.plan, specs)):
            warn(f"the remembered plan is for {unknown}, which the model has not: measuring again")
            return decision
        decision["found"] = remembered.to_json()
        if outcome is not None:
            decision["plan"] = plan_to_json(outcome.plan)
            decision["steps"] = RECALLED_REVIEW_STEPS + self._warmup_steps()
            decision["trying"] = False
            tell(f"using the remembered plan, {outcome.best}")
        return decision

    def _started(self, specs: Sequence[TensorSpec], place: Place) -> Decision:
        if self.profile is None:
            assert self.profile_path is not None
            self.profile = Profile.load(self.profile_path).carried_over(place)
            if self.profile.source != "measured":
                logger.warning("the planner's costs were %s", self.profile.source)
        for name in self._methods:
            self.profile.costs_of(name)  # names what is missing before training begins
        found = self._remember(self.profile, None)
        return {**self._begin_trial(self._timed_tensors(specs, {})), "found": found}

    def _reviewed(
        self, specs: Sequence[TensorSpec], ready_s: Mapping[str, float], ranks: Sequence[Tensor]
    ) -> Decision:
        assert self.profile is not None
        steps = slowest(ranks)
        tensors = self._timed_tensors(specs, ready_s, lateness(ranks))
        trial = self.trial
        if not self.is_trying:
            return self._looked_at(Took.of([steps]), tensors)
        assert trial is not None
        first = len(trial.tried) == 1
        trial.record(steps)
        if first:
            dense = trial.tried[0]
            if all(self.rules.choice_of(spec).method is None for spec in specs):
                self.profile = matched_to(self.profile, tensors, dense.took.reduction_s)
            dense.plan = dense_plan(self.profile, tensors)
            trial.enter(contenders(self.profile, tensors, CONTENDERS))
        trial.go_on()
        if not trial.is_over:
            return self._going_on(trial, self._warmup_steps() if first else 0)
        outcome = TrialOutcome.of(trial)
        tell(str(outcome))
        return {
            "plan": plan_to_json(outcome.plan),
            "steps": REVIEW_INTERVAL_STEPS,
            "trying": False,
            "found": self._remember(self.profile, outcome),
        }

    def _looked_at(self, took: Took, tensors: Sequence[TimedTensor]) -> Decision:
        """A review: begins another trial if steps take longer or shorter than in the last one."""
        assert self.outcome is not None
        assert self.plan is not None
        expected = self.outcome.best.took
        had_their_share = self._trial_steps > TRIAL_SHARE * self._steps
        if had_their_share or not took.differs_from(expected, TOLERATED_ERROR):
            plan = plan_to_json(self.plan)
            return {"plan": plan, "steps": REVIEW_INTERVAL_STEPS, "trying": False}
        now_s, then_s = took.step_s, expected.step_s
        tell(f"trying plans again: a step takes {now_s:.3g} s, no longer {then_s:.3g} s")
        return self._begin_trial(tensors)

    def _begin_trial(self, tensors: Sequence[TimedTensor]) -> Decision:
        assert self.profile is not None
        self.trial = Trial(dense_plan(self.profile, tensors))
        return self._going_on(self.trial)

    def _going_on(self, trial: Trial, wait_steps: int = 0) -> Decision:
        """The next turn, which begins after so many steps by its plan."""
        plan, turn = plan_to_json(trial.current.plan), trial.turn
        steps = wait_steps + sum(turn)
        return {"plan": plan, "steps": steps, "timed": turn.timed, "trying": True}

    def _remember(self, profile: Profile, outcome: TrialOutcome | None) -> dict[str, Any]:
        """Keep what was found, in the cache too."""
        assert self._key is not None
        found = Remembered(self._key, profile, outcome)
        if self.cache is not None:
            self.cache.add(found)
        return found.to_json()

    def _timed_tensors(
        self, specs: Sequence[TensorSpec], ready_s: Mapping[str, float], late_s: float = 0.0
    ) -> list[TimedTensor]:
        """Tensors, when their gradients come, and which methods they may have.

        A tensor that a rule always compresses costs the same in every plan.
        """
        return [
            TimedTensor(s, late_s + ready_s.get(s.name, 0.0), self.rules.candidates_of(s))
            for s in specs
            if self.rules.choice_of(s).method is None
            and (not ready_s or s.name in ready_s)  # others are frozen, or their gradients sparse
        ]

    def _warmup_steps(self) -> int:
        """Steps until every method's warm-up is over; the first plan tried waits for it."""
        warmups = [method.warmup for method in self._methods.values()]
        steps = max(warmup.dense_steps + warmup.steps for warmup in warmups)
        return max(0, steps - self.compressed_steps)


def planner_of(assignment: object) -> Planner | None:
    """The planner that an assignment is, or comes from; None: no planner made it."""
    if isinstance(assignment, FixedAssignment):
        return assignment.planner
    return assignment if isinstance(assignment, Planner) else None


def tell(words: str) -> None:
    """A line for the user: in the log, or on standard error where the log would not show it."""
    logger.info("Planner: %s.", words)
    if not logger.isEnabledFor(logging.INFO):
        say(f"hvd_sparse: Planner: {words}.")


def meet(transport: Transport, device: torch.device) -> Place:
    """Where the ranks are. The number of host names is the number of hosts."""
    hosts = len(set(gather_json(transport, socket.gethostname(), "hosts")))
    return place_of(transport.name, transport.world_size, hosts, device_name(device))


def device_name(device: torch.device) -> str:
    """The device as costs depend on it: "cpu", or the name of a CUDA device."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return device.type


@contextmanager
def _aborting(transport: Transport) -> Iterator[None]:
    """Let the peers' waits fail where this rank does."""
    try:
        yield
    except BaseException as error:
        transport.abort(error)
        raise
