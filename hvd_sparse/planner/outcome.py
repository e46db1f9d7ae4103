"""What came of a trial, as it is told, recorded and remembered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvd_sparse.planner.choose import ChosenPlan, Placement
from hvd_sparse.planner.trial import Took, Trial, Tried


@dataclass(frozen=True)
class Attempt:
    """A plan that was tried.

    Attributes:
        methods: Descriptions of the methods in it; none: it was the dense one.
        sparse_tensors: How many tensors they compress.
        buckets: In how many buckets.
        predicted_s: What a step was predicted to take, once dense ones had been timed.
        took: What its steps took.
    """

    methods: tuple[str, ...]
    sparse_tensors: int
    buckets: int
    predicted_s: float
    took: Took

    def __str__(self) -> str:
        ms, error_ms = 1e3 * self.took.step_s, 1e3 * self.took.error_s
        if not self.methods:
            return f"dense {ms:.1f} ± {error_ms:.1f} ms"
        words = " and ".join(short(method) for method in self.methods)
        return (
            f"{words}, {self.sparse_tensors} tensors in {self.buckets} buckets, "
            f"{ms:.1f} ± {error_ms:.1f} ms"
        )


@dataclass(frozen=True)
class Outcome:
    """A trial that is over.

    Attributes:
        tried: Its plans, the dense one first.
        chosen: Which of them stays.
        plan: That one.
    """

    tried: tuple[Attempt, ...]
    chosen: int
    plan: ChosenPlan

    @staticmethod
    def of(trial: Trial) -> Outcome:
        """Of a trial that is over."""
        winner = trial.winner
        tried = tuple(_attempt(trial, each) for each in trial.tried)
        return Outcome(tried, trial.tried.index(winner), winner.plan)

    @property
    def took(self) -> Took:
        """What steps by the chosen plan took."""
        return self.tried[self.chosen].took

    def __str__(self) -> str:
        steps = sum(each.took.steps for each in self.tried)
        return (
            f"the planner timed {steps} steps: {'; '.join(map(str, self.tried))}; "
            f"it goes on by {self.tried[self.chosen]}"
        )

    def to_json(self) -> dict[str, Any]:
        """As plain containers."""
        data = asdict(self)
        data["tried"] = [{**each, "methods": list(each["methods"])} for each in data["tried"]]
        return data

    def line(self, *, recalled: bool) -> dict[str, Any]:
        """As a recording has it."""
        tried = [
            {
                **{key: value for key, value in each.items() if key != "took"},
                **{key: each["took"][key] for key in ("step_s", "error_s", "steps")},
            }
            for each in self.to_json()["tried"]
        ]
        return {"tried": tried, "chosen": self.chosen, "recalled": recalled}

    @staticmethod
    def from_json(data: Any) -> Outcome:
        """Read what `to_json` made; anything else raises TypeError, KeyError or ValueError."""
        tried = tuple(
            Attempt(
                tuple(str(m) for m in each["methods"]),
                int(each["sparse_tensors"]),
                int(each["buckets"]),
                float(each["predicted_s"]),
                _took(each["took"]),
            )
            for each in data["tried"]
        )
        chosen = int(data["chosen"])
        if not 0 <= chosen < len(tried):
            raise ValueError(f"chosen must be in [0, {len(tried)}), got {chosen}")
        return Outcome(tried, chosen, plan_of(data["plan"]))


def plan_of(data: Any) -> ChosenPlan:
    """Read a plan's plain form; anything else raises TypeError, KeyError or ValueError."""
    return ChosenPlan(
        placements_of(data["placements"]), float(data["predicted_s"]), float(data["dense_s"])
    )


def as_json(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Placements as plain containers."""
    return {name: asdict(placement) for name, placement in placements.items()}


def placements_of(data: Mapping[str, Any]) -> dict[str, Placement]:
    """Read placements' plain form; anything else raises TypeError, KeyError or ValueError."""
    return {str(n): Placement(str(p["method"]), str(p["bucket"])) for n, p in data.items()}


def short(description: str) -> str:
    """A method's name, collective and density."""
    name, *settings = description.split()
    shown = [text for text in settings if text.startswith(("collective=", "density="))]
    return " ".join([name, *shown])


def _took(data: Any) -> Took:
    took = Took(
        float(data["step_s"]),
        float(data["error_s"]),
        float(data["reduction_s"]),
        int(data["steps"]),
    )
    if not (took.step_s > 0 and took.error_s >= 0):
        raise ValueError(f"a step's seconds must be above 0, got {took.step_s!r}")
    return took


def _attempt(trial: Trial, tried: Tried) -> Attempt:
    placements = tried.plan.placements.values()
    return Attempt(
        tuple(sorted({p.method for p in placements})),
        len(placements),
        len(set(placements)),
        trial.predicted_s(tried),
        tried.took,
    )
