"""Thresholds from distributions that are fitted to the accumulator: Gaussiank and SIDCo.

Sources:
  * Gaussiank: Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning" (arXiv
    1911.08772): a normal distribution, then at most three rough adjustments.
  * SIDCo: Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for
    Distributed Training Systems" (MLSys 2021): exponential
    distributions, fitted in stages, each to what exceeds the threshold of the stage before.

Departures of both: moments and counts are those of a sample instead of several passes over
all elements, and the normal distribution's mean, next to nothing beside its deviation, is 0.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor
from typing_extensions import override

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.selectors.sampled import SamplingEstimator, deep_threshold, finite

ADJUSTMENTS = 3
FIRST_STAGE = 0.25
"""SIDCo's δ₁: the part of the elements that each stage but the last lets through."""


class GaussianThreshold(SamplingEstimator):
    """Gaussiank's: Φ⁻¹(1 - d/2) standard deviations, halved or grown by half where it is far off.

    It overestimates k while the accumulator is flat, and underestimates it for heavy tails; the
    paper and Ok-Topk's section 5.2 show both.
    """

    @override
    def estimate(self, accumulator: Accumulator, k: int) -> tuple[float, float]:
        # Of magnitudes: the mean of what has signs is taken to be 0.
        magnitudes, density = finite(self.sample(accumulator)), k / accumulator.numel
        deviation = math.sqrt(float(magnitudes.double().square().mean()))
        if not 0.0 < deviation < math.inf:  # NaN, too: of an empty sample
            return 0.0, k
        threshold = NormalDist().inv_cdf(1 - min(density, 1 - 1e-9) / 2) * deviation
        wanted = density * magnitudes.numel()
        for _ in range(ADJUSTMENTS):
            passing = int((magnitudes >= threshold).sum())
            if passing < 2 / 3 * wanted:
                threshold *= 0.5
            elif passing > 4 / 3 * wanted:
                threshold *= 1.5
            else:
                break
        return threshold, k


class SidcoThreshold(SamplingEstimator):
    """SIDCo's: exponential tails in M stages, η_m = η_{m-1} + μ_m ln(1/δ_m).

    μ_m is the mean of the exceedances |g| - η_{m-1}. All stages but the last let δ₁ = 1/4 through.

    Departure: M follows from the density. The paper adds a stage, or drops one, as the selected
    counts of the last steps demand; here a count that is off is put right in the same step. And of
    real gradients the fit is often too high, which costs a second pass: where the sample has fewer
    than its share of k there, the threshold is the sample's own (selectors/sampled.py).
    """

    @override
    def estimate(self, accumulator: Accumulator, k: int) -> tuple[float, float]:
        sample = finite(self.sample(accumulator))
        if sample.numel() == 0:
            return 0.0, k
        threshold = self._fit(sample.view(-1), k / accumulator.numel)
        if int((sample >= threshold).sum()) * accumulator.numel >= k * sample.numel():
            return threshold, k
        return deep_threshold(sample, accumulator.numel, k)

    def _fit(self, values: Tensor, density: float) -> float:
        exceedances, threshold, left = values.abs().double(), 0.0, density
        while True:
            mean = float(exceedances.mean())
            if left >= FIRST_STAGE:
                return threshold + mean * math.log(1 / left)
            stage = mean * math.log(1 / FIRST_STAGE)
            beyond = exceedances[exceedances >= stage] - stage
            if beyond.numel() < 2 or stage == 0.0:
                return threshold + mean * math.log(1 / left)
            exceedances, threshold, left = beyond, threshold + stage, left / FIRST_STAGE
