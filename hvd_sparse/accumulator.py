"""The accumulator: what a memory holds plus one step's gradients, as a selector sees it.

A memory decides how gradients enter (`memories/`): it makes the `ops.Accumulation`. A selector
decides what leaves. The gradients are added by the first operation that takes something out, in the
same pass over memory; operations that come after it find them added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.streams import SparseStream, merge


@dataclass(frozen=True)
class Scope:
    """Where a rank may select, and its share of all ranks' entries.

    Attributes:
        start: First index of the range.
        stop: Index after its last one.
        share: Part of the k entries wanted that this rank is to take, in [0, 1].
        threshold: The magnitude that all ranks have agreed on, 0.0 where there is none.
    """

    start: int
    stop: int
    share: float = 1.0
    threshold: float = 0.0


class Accumulator:
    """Residual plus gradients of one bucket.

    Args:
        accumulation: What is accumulated. Its residual is what later operations take out of: it
            must not be read before the first one has added the gradients.
        scope: Where entries may be taken; None: everywhere. Gradients are added everywhere.

    In every operation an entry that would become non-finite is taken, wherever it is, while the
    residual keeps its old value.
    """

    def __init__(self, accumulation: ops.Accumulation, scope: Scope | None = None) -> None:
        self.residual = accumulation.residual
        self.numel = accumulation.numel
        self.scope = Scope(0, self.numel) if scope is None else scope
        self._waiting = accumulation if accumulation.gradients else None

    @property
    def width(self) -> int:
        """Elements among which entries may be taken."""
        return self.scope.stop - self.scope.start

    def select(self, threshold: float) -> SparseStream:
        """Take the nonzero entries whose magnitude reaches a threshold."""
        if self._waiting is None or self.width == self.numel:
            return self._stream(*ops.accumulate_select(self._next(), threshold))
        entries = ops.accumulate_select(self._next(), threshold, self.scope.start, self.scope.stop)
        return SparseStream(*entries, self.numel)

    def accumulate(self) -> SparseStream:
        """Add the gradients and take nothing but what is not finite."""
        return self.select(math.inf)

    def topk(self, k: int) -> tuple[SparseStream, float]:
        """Take the `k` largest magnitudes, ties to the lower index.

        Args:
            k: How many, at least 0; fewer where fewer are nonzero.

        Returns:
            The entries, and the k-th magnitude.
        """
        spoiled = self._enter_scope()
        indices, values, threshold = ops.accumulate_topk(self._next(), k)
        return self.joined(self._stream(indices, values), spoiled), threshold

    def hash_select(
        self, threshold: float, slots: int, slots_per_bucket: int, seed: int
    ) -> SparseStream:
        """Take what reaches a threshold and wins a slot; see `ops.hash_select`."""
        spoiled = self._enter_scope()
        entries = ops.hash_select(self._next(), threshold, slots, slots_per_bucket, seed)
        return self.joined(self._stream(*entries), spoiled)

    def group_topk(self, k: int, group_numel: int) -> SparseStream:
        """Take the `k` largest magnitudes of every `group_numel` consecutive elements."""
        spoiled = self._enter_scope()
        entries = ops.accumulate_group_topk(self._next(), k, group_numel)
        return self.joined(self._stream(*entries), spoiled)

    def take_at(self, indices: Tensor) -> SparseStream:
        """Take the entries at int32 `(m,)` ascending indices; the gradients must be added."""
        values = ops.on(self.residual.device).take_at(self.residual, indices)
        return SparseStream(indices, values, self.numel)

    def put_back(self, stream: SparseStream) -> None:
        """Undo the taking of entries; the non-finite ones have left their old value behind."""
        stream.finite().add_to(self.residual)

    def joined(self, taken: SparseStream, spoiled: SparseStream) -> SparseStream:
        """One stream of what was taken and of what was not finite before that.

        A spoiled entry has left its old value behind; where that was taken too, it goes back.
        """
        if spoiled.nnz == 0:
            return taken
        others = taken.without(spoiled.indices)
        self.put_back(taken.without(others.indices))
        return merge([others, spoiled], self.numel)

    # -- an estimate: of the whole vector, whatever the scope --------------------------------------

    def sample(self, runs: int, run_numel: int, seed: int) -> Tensor:
        """Magnitudes of runs of elements at random places; nothing changes."""
        accumulation = self._waiting or ops.Accumulation(self.residual)
        return ops.sample_accumulator(accumulation, runs, run_numel, seed)

    # -- gradients that wait to be added -----------------------------------------------------------

    def _enter_scope(self) -> SparseStream:
        """Add the gradients now if they reach beyond the scope; what of it is not finite."""
        if self._waiting is None or self.width == self.numel:
            return SparseStream.empty(self.numel)
        return self.accumulate()

    def _next(self) -> ops.Accumulation:
        """What the next operation is on: the gradients, once; then the scope's part as it is."""
        waiting, self._waiting = self._waiting, None
        return waiting or ops.Accumulation(self.residual[self.scope.start : self.scope.stop])

    def _stream(self, indices: Tensor, values: Tensor) -> SparseStream:
        start = self.scope.start
        return SparseStream(indices + start if start else indices, values, self.numel)
