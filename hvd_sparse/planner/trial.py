"""A trial: training goes on for a few steps by each promising plan, and the fastest one stays.

A prediction adds up costs that were measured while nothing else ran. What it cannot know is how
reductions and backward get in each other's way: they share cores and memory. So it only says which
plans are worth a try; what a step takes decides. Everything dense always takes part, and another
plan has to be faster than that. Plans that the noise of their steps does not tell apart go on for
another round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from hvd_sparse.planner.choose import ChosenPlan

SETTLING_STEPS = 3
"""First steps by a plan, which are not timed: buckets are made in them, and memory is touched."""
TIMED_STEPS = 8
CONTENDERS = 3
"""Plans that are tried beside the dense one."""
ROUNDS = 3
"""Turns that a plan may have, at most."""
LEAST_GAIN = 0.03
"""Share of a dense step that a plan must save in its trial to be worth its approximation."""
MEDIAN_ERROR = 1.4826 * 1.2533
"""A median's standard error, of normal deviates: this times their median deviation over √steps."""


def slowest(ranks: Sequence[Tensor]) -> list[tuple[float, float]]:
    """All ranks' steps as one: what each took on the rank that took longest.

    Args:
        ranks: From every rank float64 `(steps, 2)`: of each step the seconds from its first
            gradient to the next step's, and to its last reduced gradient.
    """
    worst = torch.stack(list(ranks)).amax(0)
    return [(step_s, reduction_s) for step_s, reduction_s in worst.tolist()]


@dataclass
class Tried:
    """A plan, and what its steps took.

    Attributes:
        plan: The plan.
        steps: Seconds of each step, and of its reductions.
    """

    plan: ChosenPlan
    steps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(step_s for step_s, _ in self.steps)

    @property
    def error_s(self) -> float:
        """Standard error of that."""
        middle = self.step_s
        deviation = median(abs(step_s - middle) for step_s, _ in self.steps)
        return float(MEDIAN_ERROR * deviation / len(self.steps) ** 0.5)

    @property
    def reduction_s(self) -> float:
        """The median step's reductions."""
        return median(reduction_s for _, reduction_s in self.steps)

    def differs_from(self, other: Tried, tolerance: float = 0.0) -> bool:
        """Whether their steps differ by more than noise and a share of the other's."""
        noise_s = self.error_s + other.error_s
        return abs(self.step_s - other.step_s) > tolerance * other.step_s + noise_s


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

    def record(self, steps: Sequence[tuple[float, float]]) -> None:
        """What the current plan's turn took, as `slowest` has it."""
        self._turns.popleft().steps += steps

    def go_on(self) -> None:
        """Begin another round where the last one has ended without a clear winner."""
        if self._turns or self._rounds == ROUNDS:
            return
        best = min(self.tried, key=lambda tried: tried.step_s)
        rivals = [tried for tried in self.tried if tried is best or not tried.differs_from(best)]
        if len(rivals) > 1:
            self._turns += rivals
            self._rounds += 1

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
            if tried.step_s < (1 - LEAST_GAIN) * dense.step_s and tried.differs_from(dense)
        ]
        return min(paying, key=lambda tried: tried.step_s, default=dense)

    def predicted_s(self, tried: Tried) -> float:
        """What a step was predicted to take, once dense ones had been timed."""
        dense = self.tried[0]
        return dense.step_s - dense.reduction_s + tried.plan.predicted_s

    def __str__(self) -> str:
        words = [
            f"{', '.join(sorted({p.method for p in t.plan.placements.values()})) or 'dense'}: "
            f"{1e3 * t.step_s:.1f} ± {1e3 * t.error_s:.1f} ms"
            for t in self.tried
        ]
        return "; ".join(words)
