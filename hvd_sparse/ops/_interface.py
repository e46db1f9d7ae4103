"""What an implementation of the operations has: a module or an object with these functions.

`hvd_sparse.ops` documents them; here they get checked arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Entries = tuple[Tensor, Tensor]
"""Indices and values of a stream."""


class SelectionOps(Protocol):
    """Accumulation and selection."""

    def accumulate_select(
        self, residual: Tensor, gradients: Sequence[Tensor], threshold: float
    ) -> Entries: ...

    def accumulate_topk(
        self, residual: Tensor, gradients: Sequence[Tensor], k: int, pivot: float = 0.0
    ) -> tuple[Tensor, Tensor, float]: ...


class EstimationOps(Protocol):
    """What a threshold is estimated from."""

    def kth_magnitude(self, x: Tensor, k: int) -> float: ...


class StreamOps(Protocol):
    """Streams, and their way back to a dense vector."""

    def merge_sum(self, streams: Sequence[Entries], numel: int) -> Entries: ...

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> Entries: ...

    def threshold_stream(self, indices: Tensor, values: Tensor, threshold: float) -> Entries: ...

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None: ...


class Ops(SelectionOps, EstimationOps, StreamOps, Protocol):
    """All of them."""
