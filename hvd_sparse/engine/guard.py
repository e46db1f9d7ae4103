"""What keeps an observer from ending a step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.observer import Observer
from hvd_sparse.transports import Transport

logger = logging.getLogger("hvd_sparse")


class Guard:
    """Calls an observer until it first raises; then it warns once, and calls it no more.

    Args:
        observer: Whom to call; None: nobody.
    """

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._rank = 0
        self._steps = 0

    @property
    def is_on(self) -> bool:
        """Whether anybody is called."""
        return self._observer is not None

    def planned(self, transport: Transport, buckets: Sequence[Bucket]) -> None:
        """See `Observer.planned`."""
        self._rank = transport.rank
        self._call(lambda observer: observer.planned(transport, buckets))

    def stepped(self, buckets: Sequence[Bucket]) -> None:
        """See `Observer.stepped`."""
        self._call(lambda observer: observer.stepped(buckets))
        self._steps += 1

    def compared(self, seconds: Tensor) -> None:
        """See `Observer.compared`."""
        self._call(lambda observer: observer.compared(seconds))

    def ended(self) -> None:
        """See `Observer.ended`."""
        self._call(lambda observer: observer.ended())

    def tried(self, transport: Transport, trial: Mapping[str, Any]) -> None:
        """See `Recorder.tried`, which an observer need not have."""
        if hasattr(self._observer, "tried"):
            self._call(lambda observer: observer.tried(transport, trial))  # type: ignore[attr-defined]

    def _call(self, call: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            call(self._observer)
        except Exception as error:
            logger.debug("an observer failed", exc_info=True)
            warn(
                f"rank {self._rank}: {self._observer} is off from step {self._steps + 1} on, "
                f"training goes on: {type(error).__name__}: {error}"
            )
            self._observer = None


def warn(message: str) -> None:
    """Warn, without raising where the user has made errors of warnings."""
    try:
        warnings.warn(f"hvd_sparse: {message}", stacklevel=2)
    except Warning:
        logger.warning(message)
