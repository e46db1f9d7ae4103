"""Checks of arguments, with name, range and value in every message; and options made of them.

Options are dataclasses: each field has its type, default, meaning and check in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

from hvd_sparse.errors import ConfigError

LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.001, 2_000_000


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_share(name: str, value: float) -> float:
    """A number in (0, 1]."""
    if not _is_real(value) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be in (0, 1], got {value!r}")
    return float(value)


def check_below_one(name: str, value: float) -> float:
    """A number in [0, 1)."""
    if not _is_real(value) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {value!r}")
    return float(value)


def check_above_zero(name: str, value: float) -> float:
    """A finite number above 0."""
    if not _is_real(value) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a finite number above 0, got {value!r}")
    return float(value)


def check_at_least(name: str, value: float, least: float) -> float:
    """A finite number that is not below a limit."""
    if not _is_real(value) or not least <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least {least:g}, got {value!r}")
    return float(value)


def check_timeout(name: str, value: float) -> float:
    """Seconds that the system's timers can wait: they count milliseconds in 32 bits."""
    if not _is_real(value) or not LEAST_TIMEOUT_S <= value <= MOST_TIMEOUT_S:
        raise ConfigError(
            f"{name} must be from {LEAST_TIMEOUT_S} to {MOST_TIMEOUT_S} seconds, got {value!r}"
        )
    return float(value)


def check_flag(name: str, value: bool) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return value


def check_count(name: str, value: int, least: int) -> int:
    """A whole number that is not below a limit."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """One of a few names."""
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(repr(each) if "," in each else each for each in choices)
        raise ConfigError(f"{name} must be one of {names}; got {value!r}")
    return value


Check = Callable[[str, Any], object]
"""Checks an argument, given its name and value; returns the value, or raises `ConfigError`."""


def at_least(least: float) -> Check:
    return lambda name, value: check_at_least(name, value, least)


def at_most(most: float) -> Check:
    """A number above 0 that is not above a limit."""

    def check(name: str, value: Any) -> float:
        if not _is_real(value) or not 0 < value <= most:
            raise ConfigError(f"{name} must be above 0 and at most {most:g}, got {value!r}")
        return float(value)

    return check


def count(least: int) -> Check:
    return lambda name, value: check_count(name, value, least)


def choice(choices: Collection[str]) -> Check:
    return lambda name, value: check_choice(name, value, choices)


def optional(check: Check) -> Check:
    """A check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


def option(default: Any, meaning: str, check: Check) -> Any:
    """A field of an options' dataclass.

    Args:
        default: Its default; one that must be given is a `dataclasses.field` with this metadata.
        meaning: What it is for, as docstrings and schemas show it.
        check: Returns the value in the field's own type, or raises a `ConfigError` that begins with
            the option's name.
    """
    return field(default=default, metadata={"meaning": meaning, "check": check})


def check_options(options: Any) -> None:
    """Check every field of an options' dataclass, and keep what the checks return.

    They return Python numbers for another library's, so that all ranks have the same data.

    Raises:
        ConfigError: One is out of its range.
    """
    for item in fields(options):
        value = item.metadata["check"](item.name, getattr(options, item.name))
        object.__setattr__(options, item.name, value)
