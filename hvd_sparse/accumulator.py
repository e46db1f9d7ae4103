"""The accumulator: what a memory holds plus one step's gradients, as a selector sees it.

A memory decides how gradients enter (`memories/`), a selector what leaves. The gradients are added
by the first operation that takes something out, in the same pass over memory; operations that come
after it find them added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.streams import SparseStream

NO_GRADIENTS: tuple[Tensor, ...] = ()


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
        residual: float32 `(n,)`, changed in place.
        gradients: Contiguous tensors that lie side by side over the residual.
        scope: Where entries may be taken; None: everywhere. Gradients are added everywhere.
        momentum: Corrects the gradients' momentum before they are added; None: they are added.

    In every operation an entry that would become non-finite is taken, wherever it is, while the
    residual keeps its old value.
    """

    def __init__(
        self,
        residual: Tensor,
        gradients: Sequence[Tensor],
        scope: Scope | None = None,
        momentum: ops.Momentum | None = None,
    ) -> None:
        self.residual = residual
        self.numel = residual.numel()
        self.scope = Scope(0, self.numel) if scope is None else scope
        self._gradients = gradients
        self._momentum = momentum

    @property
    def width(self) -> int:
        """Elements among which entries may be taken."""
        return self.scope.stop - self.scope.start

    def select(self, threshold: float) -> SparseStream:
        """Take the nonzero entries whose magnitude reaches a threshold."""
        if self.width == self.numel or not self._gradients:
            part, gradients, momentum = self._first_pass()
            return self._stream(*ops.accumulate_select(part, gradients, threshold, momentum))
        entries = ops.partition_select(
            self.residual,
            self._gradients,
            threshold,
            self.scope.start,
            self.scope.stop,
            self._momentum,
        )
        self._gradients, self._momentum = NO_GRADIENTS, None
        return SparseStream(*entries, self.numel)

    def accumulate(self) -> SparseStream:
        """Add the gradients and take nothing but what is not finite."""
        return self.select(math.inf)

    def topk(self, k: int, pivot: float = 0.0) -> tuple[SparseStream, float]:
        """Take the `k` largest magnitudes, ties to the lower index.

        Args:
            k: How many, at least 0; fewer where fewer are nonzero.
            pivot: A guess somewhat below the k-th magnitude, or 0.0; it only saves time.

        Returns:
            The entries, and the k-th magnitude.
        """
        spoiled = self._enter_scope()
        part, gradients, momentum = self._first_pass()
        indices, values, threshold = ops.accumulate_topk(part, gradients, k, pivot, momentum)
        return self.joined(self._stream(indices, values), spoiled), threshold

    def hash_select(
        self, threshold: float, slots: int, slots_per_bucket: int, a: int, b: int
    ) -> SparseStream:
        """Take what reaches a threshold and wins a slot; see `ops.hash_select`."""
        spoiled = self._enter_scope()
        part, gradients, momentum = self._first_pass()
        entries = ops.hash_select(
            part, gradients, threshold, slots, slots_per_bucket, a, b, momentum
        )
        return self.joined(self._stream(*entries), spoiled)

    def group_topk(self, k: int, group_numel: int) -> SparseStream:
        """Take the `k` largest magnitudes of every `group_numel` consecutive elements."""
        spoiled = self._enter_scope()
        part, gradients, momentum = self._first_pass()
        entries = ops.accumulate_group_topk(part, gradients, k, group_numel, momentum)
        return self.joined(self._stream(*entries), spoiled)

    def take_at(self, indices: Tensor) -> SparseStream:
        """Take the entries at int32 `(m,)` ascending indices; the gradients must be added."""
        return SparseStream(indices, ops.take_at(self.residual, indices), self.numel)

    def put_back(self, stream: SparseStream) -> None:
        """Undo the taking of entries; the non-finite ones have left their old value behind."""
        finite = stream.finite()
        ops.scatter_add(self.residual, finite.indices, finite.values)

    def joined(self, taken: SparseStream, spoiled: SparseStream) -> SparseStream:
        """One stream of what was taken and of what was not finite before that.

        A spoiled entry has left its old value behind; where that was taken too, it goes back.
        """
        if spoiled.nnz == 0:
            return taken
        others = ops.difference(*taken.payload(), spoiled.indices)
        clash = ops.difference(*taken.payload(), others[0])
        self.put_back(SparseStream(*clash, self.numel))
        return SparseStream(*ops.merge_sum([others, spoiled.payload()], self.numel), self.numel)

    # -- an estimate: of the whole vector, whatever the scope --------------------------------------

    def sample(self, start: int, stride: int, run: int = 1) -> Tensor:
        """Magnitudes of runs of elements, every `stride` from `start` on; nothing changes."""
        return ops.sample_accumulator(
            self.residual, self._gradients, start, stride, run, self._momentum
        )

    # -- gradients that are yet to be added --------------------------------------------------------

    def _enter_scope(self) -> SparseStream:
        """Add the gradients now if they reach beyond the scope; what of it is not finite."""
        if self.width == self.numel or not self._gradients:
            return SparseStream.empty(self.numel)
        return self.accumulate()

    def _first_pass(self) -> tuple[Tensor, Sequence[Tensor], ops.Momentum | None]:
        """The scope's part of the residual, and what is to be added to it: once."""
        gradients, momentum = self._gradients, self._momentum
        self._gradients, self._momentum = NO_GRADIENTS, None
        return self.residual[self.scope.start : self.scope.stop], gradients, momentum

    def _stream(self, indices: Tensor, values: Tensor) -> SparseStream:
        start = self.scope.start
        return SparseStream(indices + start if start else indices, values, self.numel)
