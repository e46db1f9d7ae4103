"""Gaussiank, SIDCo and MSTopK: thresholds that are fitted or searched for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import override

from hvd_sparse.checks import check_below_one, check_share, count, option
from hvd_sparse.methods.method_options import AnyCollectiveOptions
from hvd_sparse.selectors import (
    BisectionTopK,
    GaussianThreshold,
    Selector,
    SidcoThreshold,
    ThresholdSelector,
)


@dataclass(frozen=True, kw_only=True)
class GaussiankOptions(AnyCollectiveOptions):
    """Gaussiank: the threshold that a normal distribution would have.

    Source: Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv
    1911.08772): t = Φ⁻¹(1 - d/2) σ, with three rough adjustments. It often misses its density by a
    lot, and is here for comparison.
    """

    name = "gaussiank"

    sample_share: float = option(
        0.01, "Part of the elements whose moments are taken, in (0, 1].", check_share
    )

    @override
    def selector(self) -> Selector:
        return ThresholdSelector(GaussianThreshold(self.sample_share), tolerance=math.inf)


@dataclass(frozen=True, kw_only=True)
class SidcoOptions(AnyCollectiveOptions):
    """SIDCo: exponential tails fitted in stages.

    Source: Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for
    Distributed Training Systems" (MLSys 2021): η_m = η_{m-1} + μ_m ln(1/δ_m).
    """

    name = "sidco"

    sample_share: float = option(
        0.01, "Part of the elements to which the tails are fitted, in (0, 1].", check_share
    )
    tolerance: float = option(
        0.1,
        "Share of k by which the number of entries may be off before the selection is corrected, "
        "in [0, 1).",
        check_below_one,
    )

    @override
    def selector(self) -> Selector:
        return ThresholdSelector(SidcoThreshold(self.sample_share), tolerance=self.tolerance)


@dataclass(frozen=True, kw_only=True)
class MstopkOptions(AnyCollectiveOptions):
    """MSTopK: the threshold by bisection.

    Source: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud
    Clusters" (MLSys 2021).
    """

    name = "mstopk"

    halvings: int = option(30, "N, the largest number of bisections, at least 1.", count(1))
    sample_share: float = option(
        0.01, "Part of the elements from which candidates are guessed, in (0, 1].", check_share
    )
    tolerance: float = option(
        0.1, "Share of k within which bisection ends, in [0, 1).", check_below_one
    )

    @override
    def selector(self) -> Selector:
        return BisectionTopK(self.sample_share, self.tolerance, self.halvings)
