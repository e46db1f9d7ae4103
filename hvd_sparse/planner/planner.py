"""The planner: an assignment that rank 0 decides from measured costs, tries, reviews and remembers.

Rank 0 alone decides, by its own costs and by all ranks' steps; it broadcasts what it decided, and
every rank follows. A rank that fails while planning aborts the transport, so that the others fail
as well, at once, and none trains by a plan that another does not have.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_sparse.engine.bucketing import Choice, Method, TensorSpec, text_tensor
from hvd_sparse.errors import ConfigError, HvdSparseError, PlanError, warn
from hvd_sparse.planner.choose import (
    ChosenPlan,
    Placement,
    PlannedTensor,
    contenders,
    dense_plan,
    matched_to,
)
from hvd_sparse.planner.costs import CPU, Place, Profile, place_of
from hvd_sparse.planner.measure import LIMIT_S, DenseAllreduce, measure_profile
from hvd_sparse.planner.remembered import (
    Key,
    Outcome,
    PlanCache,
    Remembered,
    as_json,
    placements_of,
    plan_of,
    recall,
)
from hvd_sparse.planner.trial import CONTENDERS, TIMED_STEPS, Took, Trial, lateness, slowest
from hvd_sparse.transports import Transport

# MERGED planner.planned
# The assignment that a plan makes, which stays what it is when the planner changes its mind.

DENSE = Choice(None)


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
class Planned:
    """Rules, and what becomes of the tensors that they leave open.

    Attributes:
        rules: Which tensors are plannable, and how all others are reduced.
        placements: Of plannable tensors by name; one that is not in it is dense.
        planner: Whose plan it is.
    """

    rules: PlannableRules
    placements: Mapping[str, Placement]
    planner: object

    @property
    def description(self) -> str:
        """See `Assignment.description`."""
        words = "; ".join(
            f"{name}: {p.method} in {p.bucket}" for name, p in sorted(self.placements.items())
        )
        return f"{self.rules.description}; planned: {words or 'all dense'}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        """See `Assignment.choice_of`; plannable tensors are dense where no plan says otherwise."""
        candidates = self.rules.candidates_of(spec)
        if not candidates:
            return self.rules.choice_of(spec)
        placement = self.placements.get(spec.name)
        if placement is None:
            return DENSE
        found = next((m for m in candidates if m.description == placement.method), None)
        return DENSE if found is None else Choice(found, placement.bucket)


logger = logging.getLogger("hvd_sparse")

REVIEW_INTERVAL_STEPS = 500
"""Steps from one review to the next, once a trial is over."""
RECALLED_REVIEW_STEPS = 50
"""Steps from a restart that goes on with a plan to its first review."""
TOLERATED_ERROR = 0.25
"""Share by which a step may be off before the plan is made anew."""
TRIAL_SHARE = 0.10
"""Share of all steps that trials may take before another one begins."""


@dataclass(frozen=True)
class World:
    """What a planner measures with.

    Attributes:
        transport: Carries sparse exchanges.
        dense_allreduce: Horovod's allreduce.
        device: Where the gradients are.
    """

    transport: Transport
    dense_allreduce: DenseAllreduce
    device: torch.device = torch.device("cpu")  # noqa: RUF009


class Planner:
    """An assignment whose plannable tensors are decided in the world that trains them.

    Args:
        rules: Which tensors are plannable, and how all others are reduced.
        profile_path: A profile that `hvd-sparse profile` has saved; None: costs are measured when
            the ranks first meet.
        cache: Keeps what was found for the next run; None: nothing does.

    Attributes:
        profile: The costs that rank 0 goes by.
        plan: By what the ranks train; None before they have met.
        steps_to_review: Steps from the last decision to the next review.
        timed_steps: How many of them are timed, the last ones.
        is_trying: Whether a trial is under way. What tensors that are dense for a turn have not
            sent yet then waits for its end.
        trial: Which plans were tried, and what they took; on rank 0 alone, in the run that did so.
        outcome: What came of the last trial, this run's or a remembered one; None: none is over.
        before: By what rank 0, or the state that it loaded, trained until the ranks met; None once
            that was seen to.
        compressed_steps: Steps that the warm-up has seen; whoever trains keeps it up to date.
    """

    def __init__(
        self,
        rules: PlannableRules,
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
        self.outcome: Outcome | None = None
        self.before: Planned | None = None
        self.compressed_steps = 0
        self._methods: dict[str, Method] = {}
        self._key: Key | None = None
        self._found: dict[str, Any] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._steps = self._trial_steps = 0

    # -- an assignment -----------------------------------------------------------------------------

    @property
    def current(self) -> Planned:
        """The assignment that holds now, and does not change."""
        return Planned(self.rules, {} if self.plan is None else self.plan.placements, self)

    @property
    def description(self) -> str:
        """See `Assignment.description`."""
        return self.current.description

    def choice_of(self, spec: TensorSpec) -> Choice:
        """See `Assignment.choice_of`; plannable tensors are dense until they are decided on."""
        return self.current.choice_of(spec)

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a restart goes on with: the plan, the costs and what the trial found."""
        if self._loaded is not None:
            return dict(self._loaded)  # the ranks have not met since
        return {"placements": as_json(self.current.placements), "found": self._found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a state's plan when the ranks meet next, where rank 0's key is the same."""
        self._loaded = dict(state)

    # -- decisions, which all ranks take together --------------------------------------------------

    def decide(self, specs: Sequence[TensorSpec], world: World) -> None:
        """Go on with what is remembered; else measure, and train dense until the first review.

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
        self._begin()
        if not self._methods:
            self.plan, self._loaded = ChosenPlan({}, 0.0, 0.0), None
            return
        transport = world.transport
        with _aborting(transport):
            place = meet(transport, world.device)
            self._follow_rank_0(specs, transport, lambda: self._recalled(specs, place))
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
        """Go on with the trial, or begin another one where steps no longer take what they took.

        Args:
            specs: As in `decide`.
            ready_s: When gradients became ready, from a step's first one on.
            timed: This rank's last steps, float64 `(steps, 3)` in seconds; see `slowest`.
            transport: The world's.

        Returns:
            Whether the plan is another one.

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
            self._trial_steps += self.steps_to_review * self.is_trying
            self._follow_rank_0(specs, transport, lambda: self._reviewed(specs, ready_s, ranks))
        return before != dict(self.current.placements)

    def _follow_rank_0(
        self,
        specs: Sequence[TensorSpec],
        transport: Transport,
        decision: Callable[[], dict[str, Any]],
    ) -> None:
        """Let rank 0 decide; take over what it says.

        A decision has `plan`, `steps` to the next review, how many of them are `timed` where that
        is not usual, whether it is `trying`, what it has `found`, if that is new, and the
        placements `before` a restart.
        """
        message: dict[str, Any] = {}
        if transport.rank == 0:
            try:
                message = decision()
            except (HvdSparseError, OSError) as error:
                message = {"error": str(error)}
        sent = transport.broadcast((text_tensor(json.dumps(message)),), 0, channel="planner")
        message = json.loads(bytes(sent.numpy()))
        if "error" in message:
            raise PlanError(f"rank 0 cannot plan: {message['error']}")
        if "found" in message:
            self._found = message["found"]
            found = Remembered.from_json(self._found)
            self.profile, self.outcome = found.profile, found.outcome
        if "before" in message:
            self.before = Planned(self.rules, placements_of(message["before"]), self)
        if "plan" in message:
            plan = plan_of(message["plan"])
            known = {spec.name for spec in specs} | self._methods.keys()
            wanted = plan.placements.keys() | {p.method for p in plan.placements.values()}
            if wanted - known:
                names = ", ".join(sorted(wanted - known))
                raise PlanError(f"rank 0 plans for {names}, which this rank has not")
            self.plan = plan
            self.steps_to_review = message["steps"]
            self.timed_steps = message.get("timed", TIMED_STEPS)
            self.is_trying = message["trying"]

    def _begin(self) -> None:
        self.is_trying = False
        self.profile = self.outcome = None

    # -- rank 0 ------------------------------------------------------------------------------------

    def _recalled(self, specs: Sequence[TensorSpec], place: Place) -> dict[str, Any]:
        """What a state, this process or the cache remembers, if it is of this very place."""
        profile = ""
        if self.profile_path is not None:  # what is wrong with it, `Profile.load` tells
            profile = Path(self.profile_path).read_text("utf-8", errors="replace")
        self._key = Key.of(specs, self.rules.description, profile, place)
        loaded = self._loaded or {}
        found = [] if self.cache is None else self.cache.read()
        # Always sent: a rank that has just joined moves momenta from where the others have them.
        message: dict[str, Any] = {"before": as_json(self.current.placements)}
        try:
            if loaded:
                message["before"] = as_json(placements_of(loaded["placements"]))
            for known in (self._found, loaded.get("found")):
                found += [Remembered.from_json(known)] if known else []
        except (ConfigError, KeyError, TypeError, AttributeError) as error:
            warn(f"the state's plan cannot be read, and is left out: {error}")
        remembered, why = recall(self._key, found)
        if remembered is None:
            if why:
                tell(f"the planner measures anew: its plan was for another {why}")
            return message
        message["found"] = remembered.to_json()
        if remembered.outcome is not None:
            steps = RECALLED_REVIEW_STEPS + self._warmup_steps()
            message |= {"plan": asdict(remembered.outcome.plan), "steps": steps, "trying": False}
            attempt = remembered.outcome.tried[remembered.outcome.chosen]
            tell(f"the planner goes on with a plan that it remembers: {attempt}")
        return message

    def _started(self, specs: Sequence[TensorSpec], place: Place) -> dict[str, Any]:
        if self.profile is None:
            assert self.profile_path is not None
            self.profile = Profile.load(self.profile_path).carried_over(place)
            if self.profile.source != "measured":
                logger.warning("the planner's costs were %s", self.profile.source)
        for name in self._methods:
            self.profile.costs_of(name)  # names what is missing before training begins
        found = self._remember(self.profile, None)
        return self._begin_trial(self._planned_tensors(specs, {})) | {"found": found}

    def _reviewed(
        self,
        specs: Sequence[TensorSpec],
        ready_s: Mapping[str, float],
        ranks: Sequence[Tensor],
    ) -> dict[str, Any]:
        assert self.profile is not None
        steps = slowest(ranks)
        tensors = self._planned_tensors(specs, ready_s, lateness(ranks))
        trial = self.trial
        if not self.is_trying:
            return self._looked_at(Took.of([steps]), tensors)
        assert trial is not None
        first = len(trial.tried) == 1
        trial.record(steps)
        if first:
            dense = trial.tried[0]
            self.profile = matched_to(self.profile, tensors, dense.took.reduction_s)
            dense.plan = dense_plan(self.profile, tensors)
            trial.enter(contenders(self.profile, tensors, CONTENDERS))
        trial.go_on()
        if not trial.is_over:
            return self._going_on(trial, self._warmup_steps() if first else 0)
        outcome = Outcome.of(trial)
        tell(str(outcome))
        plan = asdict(trial.winner.plan)
        found = self._remember(self.profile, outcome)
        return {"plan": plan, "steps": REVIEW_INTERVAL_STEPS, "trying": False, "found": found}

    def _looked_at(self, took: Took, tensors: Sequence[PlannedTensor]) -> dict[str, Any]:
        """A review; it begins another trial where steps do not take what they took in the last."""
        assert self.outcome is not None
        assert self.plan is not None
        stays = {"plan": asdict(self.plan), "steps": REVIEW_INTERVAL_STEPS, "trying": False}
        expected = self.outcome.took
        if not took.differs_from(expected, TOLERATED_ERROR):
            return stays
        if self._trial_steps > TRIAL_SHARE * self._steps:
            return stays  # trials have had their share
        now_s, then_s = took.step_s, expected.step_s
        tell(f"the planner tries again: steps take {now_s:.3g} s, not {then_s:.3g} s")
        return self._begin_trial(tensors)

    def _begin_trial(self, tensors: Sequence[PlannedTensor]) -> dict[str, Any]:
        assert self.profile is not None
        self.trial = Trial(dense_plan(self.profile, tensors))
        return self._going_on(self.trial)

    def _going_on(self, trial: Trial, wait_steps: int = 0) -> dict[str, Any]:
        """The next turn, which begins after so many steps by its plan."""
        plan, turn = asdict(trial.current.plan), trial.turn
        steps = wait_steps + sum(turn)
        return {"plan": plan, "steps": steps, "timed": turn.timed, "trying": True}

    def _remember(self, profile: Profile, outcome: Outcome | None) -> dict[str, Any]:
        """Keep what was found, in the cache too."""
        assert self._key is not None
        found = Remembered(self._key, profile, outcome)
        if self.cache is not None:
            self.cache.add(found)
        return found.to_json()

    def _planned_tensors(
        self, specs: Sequence[TensorSpec], ready_s: Mapping[str, float], late_s: float = 0.0
    ) -> list[PlannedTensor]:
        """Tensors, when their gradients come, and which methods they may have."""
        return [
            PlannedTensor(
                spec, late_s + ready_s.get(spec.name, 0.0), self.rules.candidates_of(spec)
            )
            for spec in specs
        ]

    def _warmup_steps(self) -> int:
        """Steps until every method has its own density; the first plan tried waits for it."""
        warmups = [method.warmup for method in self._methods.values()]
        steps = max(warmup.dense_steps + warmup.steps for warmup in warmups)
        return max(0, steps - self.compressed_steps)


def planner_of(assignment: object) -> Planner | None:
    """The planner that an assignment is, or comes from."""
    planner = assignment.planner if isinstance(assignment, Planned) else assignment
    return planner if isinstance(planner, Planner) else None


def tell(words: str) -> None:
    """A line for the user: in the log, or on standard error where the log would not show it."""
    logger.info(words)
    if not logger.isEnabledFor(logging.INFO):
        print(f"hvd_sparse: {words}", file=sys.stderr, flush=True)


def meet(transport: Transport, device: torch.device | None = None) -> Place:
    """Where the ranks are; host names tell how many hosts there are."""
    names = transport.allgather((text_tensor(socket.gethostname()),), channel="hosts")
    hosts = len({bytes(name.numpy()) for name in names})
    return place_of(transport.name, transport.world_size, hosts, device_name(device))


def device_name(device: torch.device | None) -> str:
    """What costs on a device depend on: the name of a CUDA device."""
    if device is None or device.type == "cpu":
        return CPU
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
