"""Local gradient clipping, before gradients are accumulated.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887), section 3.3: each of
P ranks clips its own gradient to P^(-1/2) times the limit on the sum over the ranks, since the norm
of a sum of P independent gradients grows with the root of P.

The norm is that of all of a rank's gradients in a step, dense ones included, so that the first
bucket waits for the last gradient. The limit is on what the optimizer sees. The gradients here are
neither averaged nor unscaled: with s the scale of Horovod's operation and U the loss scale, the
optimizer sees ‖Σ g‖ s / U, and so a rank clips to ‖g‖ s / U ≤ limit / √P.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.bucketing import Assignment, Choice, Method, TensorSpec
from hvd_sparse.engine.residuals import norm_of


@dataclass(frozen=True)
class WithDense:
    """An assignment whose dense tensors the engine exchanges, too, by a dense method.

    Horovod would send a dense gradient as soon as it is there, before the norm of all is known.
    Tensors of fewer than `dense_below` elements are dense, whatever the inner assignment says.
    """

    inner: Assignment
    dense: Method
    dense_below: int

    @property
    def description(self) -> str:
        return f"{self.inner.description}; dense below {self.dense_below}: {self.dense.description}"

    def choice_of(self, spec: TensorSpec) -> Choice:
        choice = self.inner.choice_of(spec)
        small = spec.numel < self.dense_below or choice.method is None
        return Choice(self.dense) if small else choice


class StepClipping:
    """Clips the gradients of a plan's buckets by the norm of all of them."""

    def __init__(self, buckets: Sequence[Bucket], world_size: int) -> None:
        self._buckets = tuple(buckets)
        self._world_size = world_size
        self._norm = 0.0
        self._clipped: set[int] = set()
        self._lock = threading.Lock()  # two threads select

    def apply(self, bucket: Bucket, scale: float) -> None:
        """Scale a bucket's gradients in place if the norm of all is too large and finite.

        The first call of a step measures the norm. `scale` is s / U.
        """
        with self._lock:
            if id(bucket) in self._clipped or not self._clipped:
                self._norm = math.sqrt(math.fsum(map(_square, self._buckets))) * scale
                self._clipped.clear()
            self._clipped.add(id(bucket))
        clip_norm = bucket.method.clip_norm
        if clip_norm is None or not math.isfinite(self._norm):
            return
        limit = clip_norm / math.sqrt(self._world_size)
        if self._norm > limit:
            for gradient in bucket.contiguous_gradients():
                gradient.mul_(limit / self._norm)


def _square(bucket: Bucket) -> float:
    with bucket.lane.work():
        return norm_of(*bucket.contiguous_gradients()) ** 2
