"""What DRAGONN's hashing loses, as it is set up for training."""

import math

import pytest
import torch
from torch import Tensor

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.methods.catalogue import DragonnOptions
from hvd_sparse.ops import Accumulation
from hvd_sparse.selectors import SampledThreshold, ThresholdSelector


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """As an accumulator has it: many small entries, and few large ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).mul_(
        torch.rand(numel, generator=generator).add_(0.05).reciprocal_()
    )


def tenths(ranks: Tensor, count: int) -> Tensor:
    """How many of these ranks out of `count` are in each tenth."""
    return torch.bincount(ranks * 10 // count, minlength=10)


@pytest.mark.parametrize(
    ("numel", "steps"), [(1_000_000, 20), pytest.param(25_000_000, 3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_less_than_a_hundredth_of_every_tenth_loses_its_slot(
    numel: int, steps: int, density: float
) -> None:
    """Tenths of the tensor, and tenths of the magnitudes that reach the threshold."""
    selector = DragonnOptions(density=density).selector()
    assert isinstance(selector, ThresholdSelector)
    k = round(density * numel)
    passed, lost_places, lost_magnitudes = 0, torch.zeros(10), torch.zeros(10)
    x = heavy_tailed(numel, 0)
    for _ in range(steps):  # another sample and other hashes in each
        accumulator = Accumulator(Accumulation(x.clone()))
        threshold = selector.estimator.estimate(accumulator, k)
        expected = selector.estimator.most_passing(numel, k)
        reached = torch.nonzero(x.abs() >= threshold).view(-1)
        taken = selector.extraction.extract(accumulator, threshold, expected).indices
        lost = ~torch.isin(reached, taken.long())
        by_magnitude = x[reached].abs().argsort().argsort()
        lost_places += tenths(reached[lost], numel)
        lost_magnitudes += tenths(by_magnitude[lost], len(reached))
        passed += len(reached)
    assert lost_places.sum() == lost_magnitudes.sum() > 0
    assert float(lost_places.max()) < 0.01 * passed / 10
    assert float(lost_magnitudes.max()) < 0.01 * passed / 10


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_room_is_made_for_what_a_sample_lets_pass(density: float) -> None:
    """The threshold is deeper than the k-th magnitude, and samples differ."""
    numel = 1_000_000
    k, x = round(density * numel), heavy_tailed(numel, 1)
    estimator = SampledThreshold()
    accumulator = Accumulator(Accumulation(x))
    most = estimator.most_passing(numel, k)
    counts = torch.tensor(
        [float((x.abs() >= estimator.estimate(accumulator, k)).sum()) for _ in range(50)]
    )
    assert float(counts.mean()) > 1.1 * k
    assert float((counts > most).float().mean()) <= 0.1
    assert math.isclose(float(counts.quantile(0.98)), most, rel_tol=0.25)
