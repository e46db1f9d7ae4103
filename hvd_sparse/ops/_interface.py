"""What an implementation of the operations has: a module or an object with these functions.

`hvd_sparse.ops` documents them; here they get checked arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hvd_sparse.ops.accumulation import Accumulation

Entries = tuple[Tensor, Tensor]
"""Indices and values of a stream."""


class SelectionOps(Protocol):
    """Accumulation and selection."""

    def accumulate_select(self, accumulation: Accumulation, threshold: float) -> Entries: ...

    def accumulate_topk(
        self, accumulation: Accumulation, k: int, pivot: float = 0.0
    ) -> tuple[Tensor, Tensor, float]: ...

    def accumulate_group_topk(
        self, accumulation: Accumulation, k: int, group_numel: int = 512
    ) -> Entries: ...

    def partition_select(
        self, accumulation: Accumulation, threshold: float, start: int, stop: int
    ) -> Entries: ...

    def hash_select(
        self,
        accumulation: Accumulation,
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        a: int,
        b: int,
    ) -> Entries: ...


class EstimationOps(Protocol):
    """What a threshold is estimated from."""

    def kth_magnitude(self, x: Tensor, k: int) -> float: ...

    def sample_accumulator(
        self, accumulation: Accumulation, start: int, stride: int, run: int = 1
    ) -> Tensor: ...


class StreamOps(Protocol):
    """Streams, and their way back to a dense vector."""

    def merge_sum(self, streams: Sequence[Entries], numel: int) -> Entries: ...

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> Entries: ...

    def unapplied(self, sent: Entries, lost: Entries, applied: Tensor) -> Entries: ...

    def threshold_stream(self, indices: Tensor, values: Tensor, threshold: float) -> Entries: ...

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def take_at(self, x: Tensor, indices: Tensor) -> Tensor: ...

    def zero_at(self, x: Tensor, indices: Tensor) -> None: ...


class WireOps(Protocol):
    """What goes over the wire."""

    def gap_encode(self, indices: Tensor, start: int) -> Tensor: ...

    def gap_decode(self, code: Tensor, nnz: int, start: int, stop: int) -> Tensor: ...

    def qsgd_quantize(
        self, x: Tensor, bits: int, bucket_numel: int, seed: int
    ) -> tuple[Tensor, Tensor]: ...

    def qsgd_dequantize(
        self, codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
    ) -> Tensor: ...


class HostOps(Protocol):
    """What the ranks of one host do in memory that they share; on the CPU only."""

    def sum_vectors(self, out: Tensor, vectors: Sequence[Tensor]) -> None: ...

    def post(self, place: Tensor, number: int) -> None: ...

    def posted(self, places: Sequence[Tensor], number: int) -> bool: ...


class Ops(SelectionOps, EstimationOps, StreamOps, WireOps, Protocol):
    """All of them that tensors on any device are for."""
