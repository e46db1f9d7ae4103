"""MSTopK: the threshold by bisection.

Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
Clusters" (MLSys 2021): N bisections of [mean, max] of the magnitudes, each of which
counts all entries above; then what lies between the last two thresholds fills up to k.

Departures:
  * The bisection counts among candidates that reach a sampled threshold somewhat below the k-th
    magnitude: one pass over the tensor in place of N.
  * It ends as soon as the count is within the tolerance of k. Where N halvings do not get there
    (ties), an exact selection among the candidates fills up to k; the paper takes a random run of
    consecutive entries.
"""

from __future__ import annotations

from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.correction import keep_largest, take_more
from hvd_sparse.selectors.sampled import SAMPLE_SHARE, SampledThreshold
from hvd_sparse.selectors.selector import Selector, own_k
from hvd_sparse.selectors.thresholded import TOLERANCE
from hvd_sparse.streams import SparseStream

HALVINGS = 30


class BisectionTopK(SampledThreshold, Selector):
    """About `k` entries, cut off by a threshold that at most N `halvings` find.

    Candidates are guessed from a `sample_share` of the elements, in (0, 1]. The `threshold` is the
    magnitude from which entries left in the last step; 0.0 where all of them did.
    """

    def __init__(
        self,
        sample_share: float = SAMPLE_SHARE,
        tolerance: float = TOLERANCE,
        halvings: int = HALVINGS,
    ) -> None:
        super().__init__(sample_share)
        self.tolerance = tolerance
        self.halvings = halvings
        self.threshold = 0.0

    @override
    def select(self, accumulator: Accumulator, k: int) -> SparseStream:
        wanted = own_k(accumulator, k)
        if wanted == 0:
            return accumulator.accumulate()
        self.threshold = 0.0
        if wanted == accumulator.width:
            return accumulator.select(0.0)
        low, _ = self.estimate(accumulator, k)
        stream = accumulator.select(low)
        if not stream.isfinite():
            stream, self.threshold = keep_largest(accumulator, stream, wanted)
        elif stream.nnz < wanted * (1 - self.tolerance):
            stream, self.threshold = take_more(accumulator, stream, wanted)
        else:
            stream, self.threshold = self._bisect(accumulator, stream, wanted, low)
        return stream

    def _bisect(
        self, accumulator: Accumulator, stream: SparseStream, wanted: int, low: float
    ) -> tuple[SparseStream, float]:
        magnitudes = stream.values.abs()
        high = float(magnitudes.max())
        nnz, threshold = stream.nnz, low
        for _ in range(self.halvings):
            if abs(nnz - wanted) <= self.tolerance * wanted:
                break
            threshold = (low + high) / 2
            nnz = int((magnitudes >= threshold).sum())
            low, high = (threshold, high) if nnz > wanted else (low, threshold)
        else:
            return keep_largest(accumulator, stream, wanted)
        kept = stream.where(magnitudes >= threshold)
        accumulator.put_back(stream.without(kept.indices))
        return kept, threshold
