"""Options as dataclasses: a field has its type, default, meaning and check in one place."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from hvd_sparse.checks import Check

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
