"""The exceptions and warnings of all layers."""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import suppress
from typing import Any


class HvdSparseError(Exception):
    """Base class of the errors that this package raises."""


class ConfigError(HvdSparseError, ValueError):
    """An argument, a variable or a state from the user is invalid."""


class CheckpointError(HvdSparseError, RuntimeError):
    """A checkpoint could not be written, or cannot be read; the same on every rank."""


class UnsupportedError(HvdSparseError, NotImplementedError):
    """A combination that cannot give correct gradients."""


class PlanError(HvdSparseError, RuntimeError):
    """Ranks disagree on what to exchange, or a planned gradient did not arrive."""


class TransportError(HvdSparseError, RuntimeError):
    """A message could not be delivered; recoverable by building a new transport."""


class TransportTimeout(TransportError):
    """A peer did not answer within the transport's timeout."""


class PeerLostError(TransportError):
    """A peer's connection is gone."""


class MessageError(TransportError):
    """A message cannot be read: it is damaged, or belongs to another call."""


class _Logger(logging.LoggerAdapter):  # type: ignore[type-arg]  # takes none in Python 3.10
    """Logs to "hvd_sparse"; what a handler of the user's raises ends nothing."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with suppress(Exception):
            super().log(level, msg, *args, **kwargs)


logger = _Logger(logging.getLogger("hvd_sparse"), {})


def say(line: str) -> None:
    """Print a line on standard error; where that is full or closed, nothing ends by it."""
    with suppress(OSError, ValueError, AttributeError):  # None, where it was closed before
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def warn(message: str) -> None:
    """Warn, without raising where the user has made errors of warnings."""
    try:
        warnings.warn(f"hvd_sparse: {message}", stacklevel=2)
    except Exception:
        logger.warning(message)


def one_line(error: BaseException) -> str:
    """An exception's type and message, without line breaks."""
    return " ".join(f"{type(error).__name__}: {error}".split())
