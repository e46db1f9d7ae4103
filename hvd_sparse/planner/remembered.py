"""What a planner keeps over a restart, where that holds, and the file in which it lies.

The file is a cache: nothing in it is needed, and nothing that is wrong with it ends a training. It
holds what was found for several models and worlds, the last found last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd_sparse._version import __version__
from hvd_sparse.engine.guard import warn
from hvd_sparse.engine.plan import TensorSpec
from hvd_sparse.errors import ConfigError
from hvd_sparse.files import write_text
from hvd_sparse.planner.outcome import Outcome
from hvd_sparse.planner.profile import Place, Profile

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
