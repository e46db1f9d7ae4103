"""What a planner keeps over a restart, where that holds, and the file in which it lies.

The file is a cache: nothing in it is needed, and nothing that is wrong with it ends a training. It
holds what was found for several models and worlds, the last found last.
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
from hvd_sparse.engine.bucketing import TensorSpec
from hvd_sparse.errors import ConfigError, warn
from hvd_sparse.files import write_text
from hvd_sparse.planner.choose import ChosenPlan, Placement
from hvd_sparse.planner.costs import Place, Profile
from hvd_sparse.planner.trial import Took, Trial, Tried

# MERGED planner.outcome
# What came of a trial, as it is told, recorded and remembered.


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


VERSION = 1
MOST_ENTRIES = 64


@dataclass(frozen=True)
class Key:
    """Where a plan holds.

    Attributes:
        model: Digest of the tensors.
        policy: Digest of the rules, and of the profile that they name.
        package: Version of this package.
        place: The world.
    """

    model: str
    policy: str
    package: str
    place: Place

    @staticmethod
    def of(specs: Iterable[TensorSpec], rules: str, profile: str, place: Place) -> Key:
        """The key of a model, rules in words, a profile's text ("": none) and a world."""
        tensors = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
        return Key(_digest(tensors), _digest([rules, profile]), __version__, place)

    def differing(self, other: Key) -> list[str]:
        """What another key says otherwise, in words."""
        mine, theirs = (
            {"model": key.model, "policy": key.policy, "package": key.package, **asdict(key.place)}
            for key in (self, other)
        )
        return [
            key if key in ("model", "policy") else f"{key} {mine[key]!r}, here {theirs[key]!r}"
            for key in mine
            if mine[key] != theirs[key]
        ]


@dataclass(frozen=True)
class Remembered:
    """What was found.

    Attributes:
        key: Where.
        profile: The costs.
        outcome: What came of the trial; None: it was not over.
    """

    key: Key
    profile: Profile
    outcome: Outcome | None = None

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
            outcome = None if data["outcome"] is None else Outcome.from_json(data["outcome"])
            return Remembered(Key(**key, place=place), Profile.from_json(data["profile"]), outcome)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ConfigError(f"not a plan: {type(error).__name__}: {error}") from None


def recall(key: Key, found: Sequence[Remembered]) -> tuple[Remembered | None, str]:
    """What is remembered for a key, or why nothing is: "" where nothing is known of the model."""
    same = [each for each in reversed(found) if each.key == key]
    if same:  # a state may have been saved in a trial that was over later
        return next((each for each in same if each.outcome is not None), same[0]), ""
    every = [each.key.differing(key) for each in reversed(found)]
    related = sorted((words for words in every if "model" not in words), key=len)
    return None, "; ".join(related[0]) if related else ""


class PlanCache:
    """A file of what planners found.

    Args:
        path: Where; folders that are missing are made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> list[Remembered]:
        """All entries; none where the file is not there, or damaged, of which a warning tells."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                return []
            return [Remembered.from_json(entry) for entry in data["entries"]]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            warn(f"the planner cannot read {self.path}, and measures anew: {_told(error)}")
            return []

    def add(self, found: Remembered) -> None:
        """Write one more entry, in the place of one with the same key; a failure is a warning."""
        entries = [each for each in self.read() if each.key != found.key][1 - MOST_ENTRIES :]
        data = {"version": VERSION, "entries": [e.to_json() for e in (*entries, found)]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(data) + "\n")
        except OSError as error:
            warn(f"the planner cannot write {self.path}, and forgets its plan: {_told(error)}")


def default_path() -> Path:
    """`hvd_sparse/plans.json` in the user's folder of caches."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(folder) / "hvd_sparse" / "plans.json"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
