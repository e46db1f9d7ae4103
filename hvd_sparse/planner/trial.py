"""A trial: training goes on by each promising plan in turn, and the fastest one stays.

A prediction adds up costs that were measured while nothing else ran. What it cannot know is how
reductions and backward get in each other's way: they share cores and memory. So it only says which
plans are worth a try; what a step takes decides. Everything dense always takes part, and another
plan has to be faster than that.

Plans take turns of a few steps, round by round, every other round in the opposite order, so that
what changes meanwhile (another job, a busy link) meets all of them alike. A round ends for a plan
when it is slower than the best one for sure, and for all when those that are left are alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import hypot
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_sparse.planner.choose import ChosenPlan

SETTLING_STEPS = 3
"""First steps of a turn, which are not timed: buckets are made in them, and memory is touched."""
TIMED_STEPS = 8
TURN_STEPS = SETTLING_STEPS + TIMED_STEPS
TURN_S = 4.0
"""Where so many take longer, fewer are timed: what disturbs a long step is little beside it."""
LEAST_TIMED_STEPS = 3
CONTENDERS = 3
"""Plans that are tried beside the dense one."""
ROUNDS = 6
"""Turns that a plan may have, at most."""
MOST_STEPS = TURN_STEPS * (1 + CONTENDERS) * ROUNDS
"""Steps of a trial, at most."""
LEAST_GAIN = 0.03
"""Share of a dense step that a plan must save in its trial to be worth its approximation."""
ALIKE = 0.10
"""Share of a step by which plans may differ that need not be told apart."""
FAR = 0.25
"""From this share on one round is enough to tell plans apart."""
FAR_UNSETTLED = 1.0
"""The same for the very first turn, the dense plan's, when nothing has settled."""
CONFIDENCE = 2.0
"""Standard errors by which a difference must exceed what it is compared with."""
MEDIAN_ERROR = 1.4826 * 1.2533
"""A median's standard error, of normal deviates: this times their median deviation over √steps."""


class Turn(NamedTuple):
    """How many steps a plan trains for in its turn.

    Attributes:
        settling: First ones, which are not timed.
        timed: The others.
    """

    settling: int
    timed: int

    @staticmethod
    def of(step_s: float) -> Turn:
        """A turn whose steps take so long, about."""
        if step_s * TIMED_STEPS <= TURN_S:
            return Turn(SETTLING_STEPS, TIMED_STEPS)
        timed = max(LEAST_TIMED_STEPS, int(TURN_S / step_s))
        return Turn(max(1, SETTLING_STEPS * timed // TIMED_STEPS), timed)


Step = tuple[float, float]
"""Seconds of a step, and from its first gradient to its last reduced one."""


def slowest(ranks: Sequence[Tensor]) -> list[Step]:
    """All ranks' steps as one: what each took on the rank that took longest.

    Args:
        ranks: From every rank float64 `(steps, 3)`: of each step the seconds from its first
            gradient to the next step's, to its last reduced gradient, and to its last gradient.
    """
    worst = torch.stack(list(ranks)).amax(0)
    return [(step_s, reduction_s) for step_s, reduction_s, _ in worst.tolist()]


def lateness(ranks: Sequence[Tensor]) -> float:
    """Seconds by which the last gradient comes later on the slowest rank than on rank 0.

    Both from a step's first gradient on, rank 0's own and the first of all ranks'. No exchange ends
    before the slowest rank has begun it, and which rank that is changes from step to step. All end
    together, so the end is what times on different ranks are compared by.

    Args:
        ranks: As in `slowest`.
    """
    _, reduction_s, ready_s = torch.stack(list(ranks)).unbind(-1)
    left_s = reduction_s - ready_s  # from each rank's last gradient to the end of all
    latest_s = reduction_s.amax(0) - left_s.amin(0)
    return max(0.0, float(latest_s.quantile(0.5) - ready_s[0].quantile(0.5)))


@dataclass(frozen=True)
class Took:
    """What steps by a plan took.

    Attributes:
        step_s: The median step.
        error_s: Standard error of that.
        reduction_s: The median step's reductions.
        steps: How many were timed.
    """

    step_s: float
    error_s: float
    reduction_s: float
    steps: int

    @staticmethod
    def of(rounds: Sequence[Sequence[Step]]) -> Took:
        """Of one round or several.

        The error is that of the steps, or that of the rounds' medians, where these differ more:
        steps that follow one another have much in common.
        """
        steps = [step for steps in rounds for step in steps]
        middle = median(step_s for step_s, _ in steps)
        deviation = median(abs(step_s - middle) for step_s, _ in steps)
        medians = [median(step_s for step_s, _ in each) for each in rounds]
        apart = (max(medians) - min(medians)) / 2 / len(rounds) ** 0.5
        error_s = max(MEDIAN_ERROR * deviation / len(steps) ** 0.5, apart)
        reduction_s = median(reduction_s for _, reduction_s in steps)
        return Took(middle, float(error_s), reduction_s, len(steps))

    def differs_from(self, other: Took, tolerance: float = 0.0) -> bool:
        """Whether their steps differ by more than noise and a share of the other's."""
        noise_s = CONFIDENCE * hypot(self.error_s, other.error_s)
        return abs(self.step_s - other.step_s) > tolerance * other.step_s + noise_s

    def is_near(self, other: Took) -> bool:
        """Whether they differ by less than `ALIKE`, for sure."""
        noise_s = CONFIDENCE * hypot(self.error_s, other.error_s)
        return abs(self.step_s - other.step_s) + noise_s < ALIKE * other.step_s


@dataclass
class Tried:
    """A plan, and what its turns took.

    Attributes:
        plan: The plan.
        rounds: The timed steps of each of its turns.
    """

    plan: ChosenPlan
    rounds: list[list[Step]] = field(default_factory=list)

    @property
    def took(self) -> Took:
        """All of its steps together."""
        return Took.of(self.rounds)

    def is_settled_with(self, best: Tried, far: float = FAR) -> bool:
        """Whether no further round is needed to compare it with the best one.

        Args:
            best: That one.
            far: Share by which it must be slower where it has had a single turn.
        """
        took, least = self.took, best.took
        if len(self.rounds) == 1:
            return took.step_s > (1 + far) * least.step_s and took.differs_from(least)
        return took.differs_from(least) or took.is_near(least)


class Trial:
    """Plans take turns.

    Args:
        dense: The plan by which nothing is compressed; its turn is the first.

    Attributes:
        tried: All plans of the trial, the dense one first.
    """

    def __init__(self, dense: ChosenPlan) -> None:
        self.tried = [Tried(dense)]
        self._turns = deque(self.tried)
        self._rounds = 1

    def enter(self, plans: Sequence[ChosenPlan]) -> None:
        """Further plans, whose turns come last."""
        entered = [Tried(plan) for plan in plans]
        self.tried += entered
        self._turns += entered

    def record(self, steps: Sequence[Step]) -> None:
        """What the current plan's turn took, as `slowest` has it.

        The dense plan's second turn replaces its first one, when nothing had settled.
        """
        tried = self._turns.popleft()
        if tried is self.tried[0] and self._rounds == 2:
            tried.rounds.clear()
        tried.rounds.append(list(steps))

    def go_on(self) -> None:
        """Begin another round where the last one has left plans that may be the fastest."""
        if self._turns or self._rounds == ROUNDS:
            return
        best = min(self.tried, key=lambda tried: tried.took.step_s)
        rivals = [tried for tried in self.tried if tried is best or self._may_win(tried, best)]
        if len(rivals) > 1:
            self._rounds += 1
            self._turns += rivals if self._rounds % 2 else reversed(rivals)

    def _may_win(self, tried: Tried, best: Tried) -> bool:
        """Whether a plan that is not the best so far needs another round."""
        unsettled = tried is self.tried[0] and self._rounds == 1
        return not tried.is_settled_with(best, FAR_UNSETTLED if unsettled else FAR)

    @property
    def is_over(self) -> bool:
        """Whether nobody has a turn left."""
        return not self._turns

    @property
    def current(self) -> Tried:
        """By what to train: the plan whose turn it is, in the end the winner."""
        return self._turns[0] if self._turns else self.winner

    @property
    def winner(self) -> Tried:
        """The fastest plan; the dense one where no other saves enough, and more than noise."""
        dense = self.tried[0]
        paying = [
            tried
            for tried in self.tried
            if tried.took.step_s < (1 - LEAST_GAIN) * dense.took.step_s
            and tried.took.differs_from(dense.took)
        ]
        return min(paying, key=lambda tried: tried.took.step_s, default=dense)

    @property
    def turn(self) -> Turn:
        """The current plan's: by what its steps have taken, or else are predicted to."""
        tried = self.current
        if tried.rounds:
            return Turn.of(tried.took.step_s)
        return Turn.of(self.predicted_s(tried) if self.tried[0].rounds else tried.plan.predicted_s)

    def predicted_s(self, tried: Tried) -> float:
        """What a step was predicted to take, once dense ones had been timed."""
        dense = self.tried[0].took
        return dense.step_s - dense.reduction_s + tried.plan.predicted_s
