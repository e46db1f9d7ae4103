"""Checks of what a user gives: name, range and value in every message."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

from hvd_sparse.errors import ConfigError

LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.001, 2_000_000


def check_density(density: float) -> float:
    """A density is a number in (0, 1]."""
    return check_share("density", density)


def check_share(name: str, value: float) -> float:
    """A part of a whole, in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be in (0, 1], got {value!r}")
    return float(value)


def check_above(name: str, value: float, limit: float) -> float:
    """A finite real number above a limit."""
    if isinstance(value, bool) or not isinstance(value, Real) or not limit < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above {limit:g}, got {value!r}")
    return float(value)


def check_below_one(name: str, value: float) -> float:
    """A number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {value!r}")
    return float(value)


def check_at_most(name: str, value: float, most: float) -> float:
    """A number above 0 that is not above a limit."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value <= most:
        raise ConfigError(f"{name} must be above 0 and at most {most:g}, got {value!r}")
    return float(value)


def check_flag(name: str, value: bool) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return value


def check_at_least(name: str, value: float, least: float) -> float:
    """A finite real number that is not below a limit."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least {least:g}, got {value!r}")
    return float(value)


def check_timeout(name: str, value: float) -> float:
    """Seconds that systems can wait: their timers count milliseconds in 32 bits."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not LEAST_TIMEOUT_S <= value <= MOST_TIMEOUT_S
    ):
        raise ConfigError(
            f"{name} must be from {LEAST_TIMEOUT_S} to {MOST_TIMEOUT_S} seconds, got {value!r}"
        )
    return float(value)


def check_count(name: str, value: int, least: int) -> int:
    """A whole number that is not below a limit."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


Check = Callable[[str, Any], object]
"""Checks an argument, given its name and value; returns the value, or raises `ConfigError`."""


def at_least(least: float) -> Check:
    """`check_at_least` of a limit."""
    return lambda name, value: check_at_least(name, value, least)


def at_most(most: float) -> Check:
    """`check_at_most` of a limit."""
    return lambda name, value: check_at_most(name, value, most)


def above(limit: float) -> Check:
    """`check_above` of a limit."""
    return lambda name, value: check_above(name, value, limit)


def count(least: int) -> Check:
    """`check_count` of a limit."""
    return lambda name, value: check_count(name, value, least)


def choice(choices: Collection[str]) -> Check:
    """`check_choice` of some names."""
    return lambda name, value: check_choice(name, value, choices)


def optional(check: Check) -> Check:
    """None, or what another check lets pass."""
    return lambda name, value: None if value is None else check(name, value)


# MERGED options
# Options as dataclasses: a field has its type, default, meaning and check in one place.

REQUIRED: Any = object()
"""In place of a default, where an option must be given."""


def option(default: Any, meaning: str, check: Check) -> Any:
    """A field of an options' dataclass.

    Args:
        default: Its default, or `REQUIRED`.
        meaning: What it is for, in plain sentences: text of docstrings and schemas.
        check: Returns the value in the field's own type; raises a `ConfigError` that begins with
            the option's name where it is out of its range.
    """
    metadata = {"meaning": meaning, "check": check}
    if default is REQUIRED:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def check_options(options: Any) -> None:
    """Check every field of an options' dataclass, and keep what the checks return.

    A number of another library's is a Python number from here on: all ranks describe it alike.

    Raises:
        ConfigError: One is out of its range.
    """
    for item in fields(options):
        value = item.metadata["check"](item.name, getattr(options, item.name))
        object.__setattr__(options, item.name, value)
