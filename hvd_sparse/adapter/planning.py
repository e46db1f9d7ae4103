"""A planner beside a training: measures, times steps, and counts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn import Parameter

from hvd_sparse.adapter.binding import spec_of
from hvd_sparse.engine import Assignment, Engine, TensorSpec
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.planner import Planner, World, planner_of
from hvd_sparse.planner.measure import clock_of
from hvd_sparse.planner.trial import TIMED_STEPS


def planned_memory(assignment: Assignment, name: str, parameter: Parameter) -> MemoryOptions | None:
    """The memory that a planner's candidates give a tensor; None where it plans nothing for it."""
    planner = planner_of(assignment)
    candidates = () if planner is None else planner.rules.candidates_of(spec_of(name, parameter))
    return candidates[0].memory if candidates else None


class Planning:
    """One planner in one world.

    Args:
        planner: Decides.
        engine: Is told of every trial that is over, and of what is recalled.
        change_to: Reduces by another assignment from the next step on; all ranks call it together.
        specs: The parameters, in the order in which their gradients come on rank 0.
        world: What the planner measures with.
    """

    def __init__(
        self,
        planner: Planner,
        engine: Engine,
        change_to: Callable[[Assignment], None],
        specs: Sequence[TensorSpec],
        world: World,
    ) -> None:
        self._planner, self._engine, self._change_to = planner, engine, change_to
        self._specs, self._transport = specs, world.transport
        self._ready: deque[dict[str, Any]] = deque([{}], maxlen=TIMED_STEPS)
        self._clock = clock_of(world.device)
        self._timed: deque[tuple[float, float]] = deque(maxlen=TIMED_STEPS)
        planner.compressed_steps = engine.compressed_steps
        planner.decide(specs, world)
        if planner.outcome is not None:
            engine.tell_tried(planner.outcome.recorded(recalled=True))
        self._steps_left = planner.steps_to_review
        self._began_at = self._returned_at = perf_counter()

    @property
    def holds(self) -> bool:
        """Whether dense tensors are to keep their residuals, since they are dense for a turn."""
        return self._planner.is_trying

    def arrived(self, name: str) -> None:
        """A gradient is there; of interest in the last steps before a review."""
        if self._steps_left <= self._planner.timed_steps:
            self._ready[-1][name] = self._clock.mark()

    def returned(self) -> None:
        """A reduced gradient goes back; the last one ends the step's reductions."""
        self._returned_at = perf_counter()

    def begin_step(self) -> bool:
        """Count a step; returns whether the plan is to be reviewed in it. The same on all ranks.

        In a trial, a step begins when the device has done the one before.
        """
        if self._planner.is_trying:
            self._clock.wait()
        now = perf_counter()
        self._timed.append((now - self._began_at, self._returned_at - self._began_at))
        self._steps_left -= 1
        self._began_at = now
        if not self.is_due:
            self._ready.append({})
        return self.is_due

    @property
    def is_due(self) -> bool:
        """Whether the plan is to be reviewed in the step under way."""
        return self._steps_left <= 0  # below, where that step was given up

    def review(self) -> None:
        """Review the plan; all ranks call this together, and no gradient is under way."""
        began_at = perf_counter()
        ready_s: dict[str, list[float]] = {}
        last_s: list[float] = []
        timed = self._planner.timed_steps
        for arrived in list(self._ready)[-timed:]:
            first = next(iter(arrived.values()), None)  # they come in order
            come_s = {name: self._clock.seconds(first, at) for name, at in arrived.items()}
            last_s.append(max(come_s.values(), default=0.0))
            for name, seconds in come_s.items():
                ready_s.setdefault(name, []).append(seconds)
        middle_s = {name: median(each) for name, each in ready_s.items()}
        lasts = zip(list(self._timed)[-timed:], last_s, strict=True)
        steps = torch.tensor(
            [(*took, last) for took, last in lasts], dtype=torch.float64, device="cpu"
        )
        before = self._planner.outcome
        self._planner.compressed_steps = self._engine.compressed_steps
        changed = self._planner.review(self._specs, middle_s, steps, self._transport)
        if self._planner.outcome is not None and self._planner.outcome is not before:
            self._engine.tell_tried(self._planner.outcome.recorded(recalled=False))
        self._steps_left = self._planner.steps_to_review
        if changed:
            self._change_to(self._planner.current)
        self._ready.append({})
        self._began_at += perf_counter() - began_at
