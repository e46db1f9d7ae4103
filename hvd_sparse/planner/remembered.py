"""What a planner found, where that holds, and the cache file that keeps it over a restart.

No training depends on the cache: a file that is damaged, or of another release, is a warning. It
holds what was found for several models and worlds, the newest last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd_sparse._version import __version__
from hvd_sparse.engine.bucketing import MethodId, TensorSpec
from hvd_sparse.errors import ConfigError, one_line, warn
from hvd_sparse.files import write_text
from hvd_sparse.planner.choose import ChosenPlan, Placement
from hvd_sparse.planner.costs import Place, Profile
from hvd_sparse.planner.trial import Took, Trial, Tried

VERSION = 2
MOST_ENTRIES = 64


@dataclass(frozen=True)
class Attempt:
    """A plan that was tried: the dense one has no methods.

    `predicted_s` is the prediction for a step, once dense steps had been timed.
    """

    methods: tuple[MethodId, ...]
    sparse_tensors: int
    buckets: int
    predicted_s: float
    took: Took

    @staticmethod
    def of(trial: Trial, tried: Tried) -> Attempt:
        """A plan of a trial."""
        placements = tried.plan.placements.values()
        methods = tuple(sorted({p.method for p in placements}, key=str))
        buckets = len(set(placements))
        return Attempt(methods, len(placements), buckets, trial.predicted_s(tried), tried.took)

    def __str__(self) -> str:
        words = " and ".join(method.short for method in self.methods) or "dense"
        if self.methods:
            words += f" for {self.sparse_tensors} tensors in {self.buckets} buckets"
        return f"{words} ({1e3 * self.took.step_s:.1f} ± {1e3 * self.took.error_s:.1f} ms)"

    def to_json(self) -> dict[str, Any]:
        """As plain containers."""
        return {**asdict(self), "methods": [method.to_json() for method in self.methods]}

    @staticmethod
    def from_json(data: Any) -> Attempt:
        """Read what `to_json` made; anything else raises TypeError, KeyError or ValueError."""
        took = Took(
            float(data["took"]["step_s"]),
            float(data["took"]["error_s"]),
            float(data["took"]["reduction_s"]),
            int(data["took"]["steps"]),
        )
        if not (took.step_s > 0 and took.error_s >= 0):
            raise ValueError(f"a step's seconds must be above 0, got {took.step_s!r}")
        methods = tuple(MethodId.from_json(method) for method in data["methods"])
        numbers = int(data["sparse_tensors"]), int(data["buckets"]), float(data["predicted_s"])
        return Attempt(methods, *numbers, took)


@dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial: its plans, the dense one first, and which of them stays."""

    tried: tuple[Attempt, ...]
    chosen: int
    plan: ChosenPlan

    @staticmethod
    def of(trial: Trial) -> TrialOutcome:
        """The result of a trial that is over."""
        winner = trial.winner
        tried = tuple(Attempt.of(trial, each) for each in trial.tried)
        return TrialOutcome(tried, trial.tried.index(winner), winner.plan)

    @property
    def best(self) -> Attempt:
        """The chosen plan, as it was tried."""
        return self.tried[self.chosen]

    def __str__(self) -> str:
        slower = [str(each) for each in self.tried if each is not self.best]
        words = f"{self.best} is fastest" + (", before " + ", ".join(slower) if slower else "")
        return words if self.best.methods else f"{words}; nothing is compressed"

    def recorded(self, *, recalled: bool) -> dict[str, Any]:
        """As a recording has it; `recalled` where an earlier run made it."""
        tried = [
            {
                "methods": [str(method) for method in each.methods],
                "sparse_tensors": each.sparse_tensors,
                "buckets": each.buckets,
                "predicted_s": each.predicted_s,
                "step_s": each.took.step_s,
                "error_s": each.took.error_s,
                "steps": each.took.steps,
            }
            for each in self.tried
        ]
        return {"tried": tried, "chosen": self.chosen, "recalled": recalled}

    def to_json(self) -> dict[str, Any]:
        """As plain containers."""
        tried = [each.to_json() for each in self.tried]
        return {"tried": tried, "chosen": self.chosen, "plan": plan_to_json(self.plan)}

    @staticmethod
    def from_json(data: Any) -> TrialOutcome:
        """Read what `to_json` made; anything else raises TypeError, KeyError or ValueError."""
        tried = tuple(Attempt.from_json(each) for each in data["tried"])
        chosen = int(data["chosen"])
        if not 0 <= chosen < len(tried):
            raise ValueError(f"chosen must be in [0, {len(tried)}), got {chosen}")
        return TrialOutcome(tried, chosen, plan_from_json(data["plan"]))


def plan_to_json(plan: ChosenPlan) -> dict[str, Any]:
    """A plan as plain containers."""
    seconds = {"predicted_s": plan.predicted_s, "dense_s": plan.dense_s}
    return {"placements": placements_to_json(plan.placements), **seconds}


def plan_from_json(data: Any) -> ChosenPlan:
    """Read what `plan_to_json` made; anything else raises TypeError, KeyError or ValueError."""
    placements = placements_from_json(data["placements"])
    return ChosenPlan(placements, float(data["predicted_s"]), float(data["dense_s"]))


def placements_to_json(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Placements as plain containers."""
    return {n: {"method": p.method.to_json(), "bucket": p.bucket} for n, p in placements.items()}


def placements_from_json(data: Any) -> dict[str, Placement]:
    """Read what `placements_to_json` made; else TypeError, KeyError or ValueError."""
    return {
        str(name): Placement(MethodId.from_json(p["method"]), str(p["bucket"]))
        for name, p in data.items()
    }


@dataclass(frozen=True)
class Key:
    """Where a plan holds.

    `model` is a digest of the tensors; `policy` of rules, their profile, and the dense `backend`.
    """

    model: str
    policy: str
    package: str
    place: Place

    @staticmethod
    def of(specs: Iterable[TensorSpec], rules: str, profile: str, place: Place) -> Key:
        """The key of a model, rules in words, a profile's text ("": none) and a world."""
        tensors = sorted([spec.name, list(spec.shape), spec.dtype] for spec in specs)
        return Key(_digest(tensors), _digest([rules, profile]), __version__, place)

    def differing(self, other: Key) -> list[str]:
        """What differs in another key, in words."""
        mine, theirs = (
            {"model": key.model, "policy": key.policy, "package": key.package, **asdict(key.place)}
            for key in (self, other)
        )
        return [
            key if key in ("model", "policy") else f"{key} {mine[key]!r}, here {theirs[key]!r}"
            for key in mine
            if mine[key] != theirs[key]
        ]


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Remembered:
    """What was found under a key; without an outcome, the trial was not over."""

    key: Key
    profile: Profile
    outcome: TrialOutcome | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain containers."""
        outcome = None if self.outcome is None else self.outcome.to_json()
        return {"key": asdict(self.key), "profile": self.profile.to_json(), "outcome": outcome}

    @staticmethod
    def from_json(data: Any) -> Remembered:
        """Read what `to_json` made.

        Raises:
            ConfigError: It is not that.
        """
        try:
            key = {name: str(data["key"][name]) for name in ("model", "policy", "package")}
            place = Place.from_json(data["key"]["place"])
            profile = Profile.from_json(data["profile"])
            outcome = None if data["outcome"] is None else TrialOutcome.from_json(data["outcome"])
            return Remembered(Key(**key, place=place), profile, outcome)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"not a plan: {one_line(error)}") from None


def recall(key: Key, found: Sequence[Remembered]) -> tuple[Remembered | None, str]:
    """What is remembered for a key; else why nothing is, "" where the model is unknown."""
    same = [each for each in reversed(found) if each.key == key]
    if same:  # a state may have been saved in a trial that was over later
        return next((each for each in same if each.outcome is not None), same[0]), ""
    every = [each.key.differing(key) for each in reversed(found)]
    related = sorted((words for words in every if "model" not in words), key=len)
    return None, "; ".join(related[0]) if related else ""


class PlanCache:
    """A file of what planners found.

    Args:
        path: Where; missing folders are made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> list[Remembered]:
        """All entries. None where the file is missing, or, with a warning, cannot be read."""
        try:
            data = json.loads(self._file().read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise ConfigError(f"version must be {VERSION}, got {data['version']!r}")
            return [Remembered.from_json(entry) for entry in data["entries"]]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warn(f"the planner cannot read {self.path}, and measures anew: {one_line(error)}")
            return []

    def add(self, found: Remembered) -> None:
        """Write one more entry, in place of one with the same key; a failure is a warning."""
        entries = [each for each in self.read() if each.key != found.key][1 - MOST_ENTRIES :]
        data = {"version": VERSION, "entries": [e.to_json() for e in (*entries, found)]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file(), json.dumps(data) + "\n")
        except (OSError, ValueError) as error:
            warn(f"the planner cannot write {self.path}, and forgets its plan: {one_line(error)}")

    def _file(self) -> Path:
        if self.path.exists() and not self.path.is_file():
            raise OSError("no ordinary file")  # a pipe would be waited for
        return self.path


def default_path() -> Path | None:
    """`hvd_sparse/plans.json` in the user's folder of caches; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder, "hvd_sparse", "plans.json") if os.path.isabs(folder) else None
