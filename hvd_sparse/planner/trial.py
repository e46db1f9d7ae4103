"""A trial: promising plans take turns in training, and the fastest one stays.

The dense plan always takes part, and another plan must be faster than that. Plans take turns of a
few steps. Every other round is in the opposite order, so that outside changes (another job, a busy
link) affect all plans alike. A plan leaves the trial when it is clearly slower than the best one;
the trial ends when the remaining plans are alike.
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
"""First steps of a turn, which are not timed: they create buckets and touch memory."""
TIMED_STEPS = 8
TURN_STEPS = SETTLING_STEPS + TIMED_STEPS
TURN_S = 4.0
"""If `TIMED_STEPS` take longer, fewer are timed: disturbances are small beside long steps."""
LEAST_TIMED_STEPS = 3
CONTENDERS = 3
"""Plans tried beside the dense one."""
ROUNDS = 6
"""Largest number of turns of a plan."""
MOST_STEPS = TURN_STEPS * (1 + CONTENDERS) * ROUNDS
"""Largest number of steps of a trial."""
LEAST_GAIN = 0.03
"""Share of a dense step that a plan must save in its trial to be worth its approximation."""
ALIKE = 0.10
"""Relative difference of plans that need not be told apart."""
FAR = 0.25
"""Relative difference from which one round is enough to tell plans apart."""
FAR_UNSETTLED = 1.0
"""The same in the dense plan's first turn, when nothing has settled."""
CONFIDENCE = 2.0
"""Standard errors that a difference must exceed."""
MEDIAN_ERROR = 1.4826 * 1.2533
"""Standard error of a normal sample's median: this times the median deviation, over √steps."""


class Turn(NamedTuple):
    """How many steps a turn has: first those that are not timed, then those that are."""

    settling: int
    timed: int

    @staticmethod
    def of(step_s: float) -> Turn:
        """The turn for a step of about this time."""
        if step_s * TIMED_STEPS <= TURN_S:
            return Turn(SETTLING_STEPS, TIMED_STEPS)
        timed = max(LEAST_TIMED_STEPS, int(TURN_S / step_s))
        return Turn(max(1, SETTLING_STEPS * timed // TIMED_STEPS), timed)


Step = tuple[float, float]
"""Seconds of a step, and from its first gradient to its last reduced one."""


def slowest(ranks: Sequence[Tensor]) -> list[Step]:
    """Each step's times on its slowest rank.

    Args:
        ranks: From every rank float64 `(steps, 3)`: of each step the seconds from its first
            gradient to the next step's, to its last reduced gradient, and to its last gradient.
    """
    worst = torch.stack(list(ranks)).amax(0)
    return [(step_s, reduction_s) for step_s, reduction_s, _ in worst.tolist()]


def lateness(ranks: Sequence[Tensor]) -> float:
    """Seconds by which the slowest rank's last gradient is later than rank 0's.

    Rank 0's counts from its own first gradient, the slowest rank's from the first of all ranks. No
    exchange ends before the slowest rank has begun it; which rank that is changes from step to
    step. All ranks end an exchange together, so times on different ranks are compared by that end.

    Args:
        ranks: As in `slowest`.
    """
    _, reduction_s, ready_s = torch.stack(list(ranks)).unbind(-1)
    left_s = reduction_s - ready_s  # from each rank's last gradient to the end of all
    latest_s = reduction_s.amax(0) - left_s.amin(0)
    return max(0.0, float(latest_s.quantile(0.5) - ready_s[0].quantile(0.5)))


@dataclass(frozen=True)
class Took:
    """A plan's median step and median reduction, the step's standard error, and how many it had."""

    step_s: float
    error_s: float
    reduction_s: float
    steps: int

    @staticmethod
    def of(rounds: Sequence[Sequence[Step]]) -> Took:
        """The times of one round or several.

        The error is that of the steps or that of the rounds' medians, whichever is larger: steps
        that follow one another are correlated.
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
        """Whether they differ by more than noise and this share of the other's step."""
        noise_s = CONFIDENCE * hypot(self.error_s, other.error_s)
        return abs(self.step_s - other.step_s) > tolerance * other.step_s + noise_s

    def is_near(self, other: Took) -> bool:
        """Whether they clearly differ by less than `ALIKE`."""
        noise_s = CONFIDENCE * hypot(self.error_s, other.error_s)
        return abs(self.step_s - other.step_s) + noise_s < ALIKE * other.step_s


@dataclass
class Tried:
    """A plan, and the timed steps of each of its turns."""

    plan: ChosenPlan
    rounds: list[list[Step]] = field(default_factory=list)

    @property
    def took(self) -> Took:
        """The times of all its steps."""
        return Took.of(self.rounds)

    def is_settled_with(self, best: Tried, far: float = FAR) -> bool:
        """Whether it needs no further round to be compared with the best plan.

        After a single turn, it must be slower by the share `far`.
        """
        took, least = self.took, best.took
        if len(self.rounds) == 1:
            return took.step_s > (1 + far) * least.step_s and took.differs_from(least)
        return took.differs_from(least) or took.is_near(least)


class Trial:
    """Plans that take turns. The first turn is that of the plan that compresses nothing."""

    def __init__(self, dense: ChosenPlan) -> None:
        self.tried = [Tried(dense)]
        self._turns = deque(self.tried)
        self._rounds = 1

    def enter(self, plans: Sequence[ChosenPlan]) -> None:
        """Add plans, whose turns come last."""
        entered = [Tried(plan) for plan in plans]
        self.tried += entered
        self._turns += entered

    def record(self, steps: Sequence[Step]) -> None:
        """Take the steps of the current plan's turn, as `slowest` returns them.

        The dense plan's second turn replaces its first, in which nothing had settled.
        """
        tried = self._turns.popleft()
        if tried is self.tried[0] and self._rounds == 2:
            tried.rounds.clear()
        tried.rounds.append(list(steps))

    def go_on(self) -> None:
        """Begin another round if more than one plan may still be the fastest."""
        if self._turns or self._rounds == ROUNDS:
            return
        best = min(self.tried, key=lambda tried: tried.took.step_s)
        rivals = [tried for tried in self.tried if tried is best or self._may_win(tried, best)]
        if len(rivals) > 1:
            self._rounds += 1
            self._turns += rivals if self._rounds % 2 else reversed(rivals)

    def _may_win(self, tried: Tried, best: Tried) -> bool:
        """Whether a plan that is not the best so far may still win."""
        unsettled = tried is self.tried[0] and self._rounds == 1
        return not tried.is_settled_with(best, FAR_UNSETTLED if unsettled else FAR)

    @property
    def is_over(self) -> bool:
        """Whether no plan has a turn left."""
        return not self._turns

    @property
    def current(self) -> Tried:
        """The plan to train by: the one whose turn it is, in the end the winner."""
        return self._turns[0] if self._turns else self.winner

    @property
    def winner(self) -> Tried:
        """The fastest plan; the dense one unless another saves enough, and more than noise."""
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
        """The current plan's turn, by the measured or else the predicted time of its steps."""
        tried = self.current
        if tried.rounds:
            return Turn.of(tried.took.step_s)
        return Turn.of(self.predicted_s(tried) if self.tried[0].rounds else tried.plan.predicted_s)

    def predicted_s(self, tried: Tried) -> float:
        """The prediction for a step, from the measured time of dense steps."""
        dense = self.tried[0].took
        return dense.step_s - dense.reduction_s + tried.plan.predicted_s
