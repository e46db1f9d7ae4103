"""DGC's threshold: the k-th magnitude of a sample.

Source: Lin et al., "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887) and its
release: 1 % of the elements, strided, from a random start.

Symbols: n elements, s of them sampled in R runs, k wanted.

Departures:
  * Runs of 16 neighbours, a cache line, each at a random place of its Rth part of the vector:
    every tensor has its share, and no stride beats with a layer's width. 6144 to 98304 elements in
    all, which takes a tenth of a pass over 25 million.
  * Of the sample, s k/n reach the k-th magnitude, give or take a deviation. Neighbours resemble
    each other: rows, channels and experts have scales of their own. So the deviation is what the
    runs' own counts tell, √(R Var(count)), and at least √(s k/n), that of independent elements.
    The threshold is taken three deviations deeper than that rank. So it lets a little too many pass
    as a rule, which `correction.keep_largest` cuts in O(k) ("hierarchical selection" in the paper),
    and seldom too few, which costs a pass. The release lowers it by 0.8 up to ten times then.
  * The result is cut where it exceeds k by more than 10 %, not 30 %.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse import ops
from hvd_sparse.accumulator import Accumulator
from hvd_sparse.magnitude import INFINITE_KEY, magnitude_keys
from hvd_sparse.selectors.selector import mixed
from hvd_sparse.selectors.thresholded import Estimator
from hvd_sparse.streams import CPU

SAMPLE_SHARE = 0.0075
LEAST_SAMPLE, MOST_SAMPLE = 3 << 11, 3 << 15
RUN_NUMEL = 16
"""Neighbours that are looked at together: memory is read by the cache line."""
DEVIATIONS = 3.0
"""Of the sampled count, between the expected rank and that of the threshold."""


class SamplingEstimator(Estimator):
    """Estimates from samples of a share of the elements, in (0, 1], elsewhere in each step."""

    kept = ("step",)

    def __init__(self, sample_share: float = SAMPLE_SHARE) -> None:
        self.share = sample_share
        self.step = 0

    def sample(self, accumulator: Accumulator) -> Tensor:
        """Magnitudes of some thousand elements at least, or of all; float32 `(R, run)`."""
        runs, run_numel = runs_of(accumulator.numel, self.share)
        magnitudes = accumulator.sample(runs, run_numel, mixed(0, self.step))
        self.step += 1
        return magnitudes.view(-1, run_numel)


class SampledThreshold(SamplingEstimator):
    """The threshold that a sample suggests, somewhat below the k-th magnitude."""

    @override
    def estimate(self, accumulator: Accumulator, k: int) -> tuple[float, float]:
        return deep_threshold(self.sample(accumulator), accumulator.numel, k)


def runs_of(numel: int, share: float) -> tuple[int, int]:
    """How many runs a sample of a share of the elements has, and of how many elements."""
    wanted = min(max(round(share * numel), LEAST_SAMPLE), MOST_SAMPLE)
    return (numel, 1) if numel <= wanted else (wanted // RUN_NUMEL, RUN_NUMEL)


def finite(sample: Tensor) -> Tensor:
    """The same, with zeros where it is not finite."""
    return torch.where(magnitude_keys(sample) < INFINITE_KEY, sample, 0.0)


def deep_threshold(sample: Tensor, numel: int, k: int) -> tuple[float, float]:
    """The magnitude in a sample that lies some standard deviations below the k-th of all, k > 0.

    The sample, float32 `(R, run)`, of so many elements is lost. Returns the threshold, and how many
    of all elements reach it, plus as many deviations.
    """
    sampled, run_numel = sample.numel(), sample.shape[-1]
    if sampled == 0:
        return 0.0, k
    (sample,) = ops.moved((sample,), CPU)  # less than a megabyte, and one wait
    expected = sampled * k / numel
    left_out = 1 - sampled / numel  # what is sampled whole has no deviation
    rank = math.ceil(expected)
    # No run has more than all of its elements among these: no deviation can be larger.
    deepest = math.ceil(rank + DEVIATIONS * math.sqrt(left_out * run_numel * rank) + 1)
    largest = ops.accumulate_topk(ops.Accumulation(sample.view(-1)), min(sampled, deepest))[:2]
    indices, values = (part.numpy() for part in largest)
    ranked = np.sort(values)[::-1]  # on numpy, whose calls on few elements are short
    if rank > len(ranked):
        return 0.0, k
    if not np.isfinite(ranked[0]):
        sample.view(-1)[largest[0].long()] = largest[1]
        return deep_threshold(finite(sample), numel, k)
    in_run = np.bincount(indices[values >= ranked[rank - 1]] // run_numel)
    variance = float(in_run @ in_run) - rank**2 * run_numel / sampled
    margin = DEVIATIONS * math.sqrt(left_out * max(variance, expected))
    deep = min(math.ceil(expected + margin + (left_out > 0)), deepest)
    threshold = float(ranked[deep - 1]) if deep <= len(ranked) else 0.0
    return threshold, numel / sampled * (deep + margin * math.sqrt(deep / expected))
