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


Check = Callable[[str, Any], Any]
"""Checks an argument, given its name and value; returns the value, or raises `ConfigError`."""


def _number(words: str, fits: Callable[[Any], bool]) -> Callable[[str, Any], float]:
    """The check that a value is a number of this kind."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
            raise ConfigError(f"{name} must be {words}, got {value!r}")
        return float(value)

    return check


def at_least(least: float) -> Callable[[str, Any], float]:
    words = f"a finite number of at least {least:g}"
    return _number(words, lambda value: least <= value < math.inf)


def at_most(most: float) -> Callable[[str, Any], float]:
    return _number(f"above 0 and at most {most:g}", lambda value: 0 < value <= most)


check_share = _number("in (0, 1]", lambda value: 0 < value <= 1)
check_below_one = _number("in [0, 1)", lambda value: 0 <= value < 1)
check_above_zero = _number("a finite number above 0", lambda value: 0 < value < math.inf)
check_not_negative = at_least(0)
check_timeout = _number(
    f"from {LEAST_TIMEOUT_S} to {MOST_TIMEOUT_S} seconds",
    lambda value: LEAST_TIMEOUT_S <= value <= MOST_TIMEOUT_S,
)
"""What the system's timers can wait: they count milliseconds in 32 bits."""


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
