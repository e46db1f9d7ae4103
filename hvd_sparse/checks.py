"""Checks of what a user gives: name, range and value in every message."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real

from hvd_sparse.errors import ConfigError


def check_density(density: float) -> float:
    """A density is a number in (0, 1]."""
    if isinstance(density, bool) or not isinstance(density, Real) or not 0 < density <= 1:
        raise ConfigError(f"density must be in (0, 1], got {density!r}")
    return float(density)


def check_at_least(name: str, value: float, least: float) -> float:
    """A real number that is not below a limit."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value >= least:
        raise ConfigError(f"{name} must be a number of at least {least:g}, got {value!r}")
    return float(value)


def check_count(name: str, value: int, least: int) -> int:
    """A whole number that is not below a limit."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def check_choice(name: str, value: str, choices: Collection[str]) -> str:
    """One of a few names."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value
