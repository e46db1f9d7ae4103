"""Sums over the magnitudes above a threshold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moments:
    """Sums over the finite, nonzero entries x of a vector with |x| >= a threshold.

    Sums are formed in float64. Their order, and so their last bits, depend on the implementation.

    Attributes:
        count: Number of these entries.
        sum: Σ x.
        sum_of_squares: Σ x².
        sum_of_magnitudes: Σ |x|.
        sum_of_logs: Σ ln |x|.
        largest: max |x|; 0.0 without entries.
    """

    count: int
    sum: float
    sum_of_squares: float
    sum_of_magnitudes: float
    sum_of_logs: float
    largest: float
