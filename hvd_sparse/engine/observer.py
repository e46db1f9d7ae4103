"""Who is told what an engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.transports import Transport

COMPARED_PHASES = ("stage_s", "accumulate_select_s", "exchange_s", "decode_s", "wait_s")
"""The columns of what `Observer.compared` is given."""


class Observer(Protocol):
    """Called by the training thread between the end of an exchange and the next gradients."""

    def planned(self, transport: Transport, buckets: Sequence[Bucket]) -> None:
        """The step that ends now made a plan; without buckets: the last plan is given up."""

    def stepped(self, buckets: Sequence[Bucket]) -> None:
        """A step has ended; the buckets' statistics include it. Without buckets: all was dense."""

    def compared(self, seconds: Tensor) -> None:
        """What the phases took on every rank.

        Args:
            seconds: float64 `(P, len(COMPARED_PHASES))`, sums since the last call, on every rank.
        """

    def ended(self) -> None:
        """No step follows by this transport."""
