"""DGC's threshold: the k-th magnitude of a strided sample.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887) and its
release: 1 % of the elements, strided, from a random start.

Symbols: n elements, s of them sampled, k wanted.

Departures:
  * Runs of 32 neighbours, at an odd stride, so that it does not beat with a layer's width of a
    power of two; 8192 to 131072 elements in all, which takes a tenth of a pass over 25 million.
  * Of the sample, s k/n ± its square root (one standard deviation) reach the k-th magnitude. The
    threshold is taken two deviations deeper than that rank. So it lets a little too many pass as a
    rule, which `correction.keep_largest` cuts in O(k) ("hierarchical selection" in the paper),
    and seldom too few, which costs a pass. The release lowers it by 0.8 up to ten times then.
  * The result is cut where it exceeds k by more than 10 %, not 30 %.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator
from hvd_sparse.magnitude import INFINITE_KEY, magnitude_keys
from hvd_sparse.selectors.selector import mixed
from hvd_sparse.selectors.thresholded import Estimator

SAMPLE_SHARE = 0.01
LEAST_SAMPLE, MOST_SAMPLE = 1 << 13, 1 << 17
RUN = 32
"""Neighbours that are looked at together: memory is read by the cache line, and by the page."""


class SamplingEstimator(Estimator):
    """Estimates from strided samples, with another start in each step.

    Args:
        sample_share: Part of the elements to look at, in (0, 1].
        seed: Of the sample's random start.
    """

    kept = ("step",)

    def __init__(self, sample_share: float = SAMPLE_SHARE, seed: int = 0) -> None:
        self.share = sample_share
        self.seed = seed
        self.step = 0

    def sample(self, accumulator: Accumulator) -> Tensor:
        """Magnitudes of some thousand elements at least, or of all; float32 `(s,)`.

        What is not finite counts as zero, so that nothing waits for their number.
        """
        stride = sample_stride(accumulator.numel, self.share)
        start = mixed(self.seed, self.step) % stride
        self.step += 1
        magnitudes = accumulator.sample(start, stride, min(RUN, stride))
        return torch.where(magnitude_keys(magnitudes) < INFINITE_KEY, magnitudes, 0.0)

    def sampled(self, numel: int) -> int:
        """About how many of `numel` elements a sample has, at least 1."""
        stride = sample_stride(numel, self.share)
        return max(1, numel * min(RUN, stride) // stride)


class SampledThreshold(SamplingEstimator):
    """The threshold that a sample suggests, somewhat below the k-th magnitude."""

    @override
    def estimate(self, accumulator: Accumulator, k: int) -> float:
        sample = self.sample(accumulator)
        if sample.numel() == 0:
            return 0.0
        return ops.kth_magnitude(sample, deep_rank(sample.numel(), accumulator.numel, k))

    @override
    def most_passing(self, numel: int, k: int) -> float:
        """Two standard deviations above the expected count.

        Of a sample, r reach the threshold, and so do n r/s of all, give or take n √r/s.
        """
        sampled = self.sampled(numel)
        rank = deep_rank(sampled, numel, k)
        return numel / sampled * (rank + 2 * math.sqrt(rank))


def sample_stride(numel: int, share: float) -> int:
    """From one run to the next, where about a share of the elements is looked at; odd."""
    wanted = min(max(round(share * numel), LEAST_SAMPLE), MOST_SAMPLE)
    return max(1, (numel * RUN // wanted - 1) | 1)


def deep_rank(sampled: int, numel: int, k: int) -> int:
    """The rank in a sample that lies two standard deviations below the k-th magnitude."""
    expected = sampled * k / numel
    return min(sampled, math.ceil(expected + 2 * math.sqrt(expected) + 1))
