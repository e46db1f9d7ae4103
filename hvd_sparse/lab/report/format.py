"""What each line of a recording must hold.

A recording may come from anywhere. Every value has its type and range checked before it is drawn,
so nothing else can reach the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from reprlib import repr as short_repr
from typing import Any

from hvd_sparse.engine.account import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.errors import ConfigError

MOST = 1e50
"""Largest number: sums of many still are numbers."""
MOST_UNIX_S = 253402300799
"""The end of the year 9999, the last that can be shown."""

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """A finite number, not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def is_count(value: Any) -> bool:
    """A whole number, not negative, that a float holds exactly."""
    return isinstance(value, int) and is_number(value) and value <= 2**53


def is_positive(value: Any) -> bool:
    """A count above 0."""
    return is_count(value) and value > 0


def is_number_or_none(value: Any) -> bool:
    """A number, or null for what was not finite."""
    return value is None or is_number(value)


def is_seconds(value: Any) -> bool:
    """A time above 0."""
    return is_number(value) and value > 0


def is_flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def is_moment(value: Any) -> bool:
    """Seconds since 1970."""
    return is_number(value) and value <= MOST_UNIX_S


def is_text(value: Any) -> bool:
    """Any text."""
    return isinstance(value, str)


def list_of(check: Check) -> Check:
    """A list of what passes."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_names(value: Any) -> bool:
    """One name or more."""
    return list_of(is_text)(value) and len(value) > 0


def is_spans(value: Any) -> bool:
    """Start and seconds of each phase."""
    return isinstance(value, dict) and all(
        list_of(is_number)(span) and len(span) == 2 for span in value.values()
    )


def is_bucket(value: Any) -> bool:
    """The description of a bucket."""
    return isinstance(value, dict) and all(
        key in value and check(value[key]) for key, check in BUCKET.items()
    )


BUCKET: Mapping[str, Check] = {
    "names": is_names,
    "numel": is_count,
    "k": is_count,
    "density": is_number,
    "dtype": is_text,
    "compressor": is_text,
    "wire": is_text,
}
ATTEMPT: Mapping[str, Check] = {
    "methods": list_of(is_text),
    "sparse_tensors": is_count,
    "buckets": is_count,
    "predicted_s": is_number,
    "step_s": is_seconds,
    "error_s": is_number,
    "steps": is_count,
}


def is_trial(value: Any) -> bool:
    """One attempt or more, the dense one first."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(each, dict)
            and all(key in each and check(each[key]) for key, check in ATTEMPT.items())
            for each in value
        )
    )


LINES: Mapping[str, Mapping[str, Check]] = {
    "run": {
        "id": is_text,
        "version": is_count,
        "hvd_sparse": is_text,
        "torch": is_text,
        "host": is_text,
        "pid": is_count,
        "rank": is_count,
        "world_size": is_positive,
        "transport": is_text,
        "start_unix_s": is_moment,
    },
    "plan": {"id": is_text, "step": is_count, "buckets": list_of(is_bucket)},
    "steps": {
        "id": is_text,
        "step": is_count,
        "steps": is_positive,
        "at_s": is_number,
        "seconds": is_number,
        "collective": list_of(is_text),
        "threshold": list_of(is_number_or_none),
        "imbalance": list_of(is_number),
        "spans": list_of(is_spans),
        **dict.fromkeys(FIGURES, list_of(is_number)),
    },
    "residual": {
        "id": is_text,
        "step": is_count,
        "bucket": is_count,
        "norm": is_number_or_none,
    },
    "trial": {
        "id": is_text,
        "step": is_count,
        "tried": is_trial,
        "chosen": is_count,
        "recalled": is_flag,
    },
    "ranks": {
        "id": is_text,
        "step": is_count,
        "steps": is_positive,
        **dict.fromkeys(COMPARED_PHASES, list_of(is_number)),
    },
}
"""What must be in a line of each kind."""


def check_line(line: Any, place: str) -> dict[str, Any]:
    """A line as it must be.

    Args:
        line: What was read.
        place: File and line, for the message.

    Raises:
        ConfigError: It is not; the message names the key and the value.
    """
    kind = line.get("kind") if isinstance(line, dict) else None
    if not isinstance(kind, str) or kind not in LINES:
        raise ConfigError(f"{place}: kind must be one of {', '.join(LINES)}")
    missing = [key for key in LINES[kind] if key not in line]
    if missing:
        raise ConfigError(f"{place}: a {kind!r} line without {', '.join(missing)}")
    for key, check in LINES[kind].items():
        if not check(line[key]):
            raise ConfigError(
                f"{place}: {key} of a {kind!r} line cannot be {short_repr(line[key])}"
            )
    checked: dict[str, Any] = line
    return checked
