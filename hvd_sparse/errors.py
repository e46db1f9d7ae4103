"""The exceptions and warnings of all layers."""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("hvd_sparse")


class HvdSparseError(Exception):
    """Base class of what this package raises on its own account."""


class ConfigError(HvdSparseError, ValueError):
    """An argument, a variable or a state that the user gave is out of its range."""


class CheckpointError(HvdSparseError, RuntimeError):
    """A checkpoint could not be written, or cannot be read; every rank is told the same."""


class UnsupportedError(HvdSparseError, NotImplementedError):
    """A combination that cannot give right gradients, refused by name."""


class PlanError(HvdSparseError, RuntimeError):
    """Ranks disagree on what is to be exchanged, or a planned gradient did not come."""


class TransportError(HvdSparseError, RuntimeError):
    """A message could not be delivered; recoverable by building a new transport."""


class TransportTimeout(TransportError):
    """A peer did not answer within the transport's timeout."""


class PeerLostError(TransportError):
    """A peer's connection is gone."""


class MessageError(TransportError):
    """A message cannot be read: it was damaged, or it is one of another call."""


def warn(message: str) -> None:
    """Warn, without raising where the user has made errors of warnings."""
    try:
        warnings.warn(f"hvd_sparse: {message}", stacklevel=2)
    except Warning:
        logger.warning(message)
