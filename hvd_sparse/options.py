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
        check: Raises a `ConfigError` that begins with the option's name where a value is out of
            its range.
    """
    metadata = {"meaning": meaning, "check": check}
    if default is REQUIRED:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def check_options(options: Any) -> None:
    """Check every field of an options' dataclass.

    Raises:
        ConfigError: One is out of its range.
    """
    for item in fields(options):
        item.metadata["check"](item.name, getattr(options, item.name))
