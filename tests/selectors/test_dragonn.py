"""What DRAGONN's hashing loses, as it is set up for training."""

import math

import pytest
import torch
from torch import Tensor

from hvd_sparse.accumulator import Accumulator
from hvd_sparse.methods.catalogue import DragonnOptions
from hvd_sparse.ops import Accumulation
from hvd_sparse.selectors import HashedExtraction, SampledThreshold, ThresholdSelector


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
        threshold, expected = selector.estimator.estimate(accumulator, k)
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
    estimates = [estimator.estimate(accumulator, k) for _ in range(50)]
    counts = torch.tensor([float((x.abs() >= threshold).sum()) for threshold, _ in estimates])
    most = torch.tensor([most for _, most in estimates])
    assert float(counts.mean()) > 1.1 * k
    assert float((counts > most).float().mean()) <= 0.1
    assert math.isclose(float(counts.quantile(0.98)), float(most.mean()), rel_tol=0.25)


def patterns(numel: int, count: int) -> dict[str, Tensor]:
    """Indices, `(count,)`, as columns, rows, runs and blocks have them."""
    strides = (1, 2, 3, 10, 24, 48, 64, 96, 97, 100, 127, 128)
    place = torch.arange(count)
    found = {f"every {stride}": place * stride for stride in strides if stride * count <= numel}
    for run in (4, 32, 500):
        found[f"runs of {run}"] = place // run * (run * (numel // count)) + place % run
    found["a block within rows of 512"] = place // 40 * 512 + 200 + place % 40
    found["two columns of rows of 768"] = place // 2 * 384 + place % 2 * 100
    return {name: indices[indices < numel] for name, indices in found.items()}


@pytest.mark.parametrize("count", [2000, 10_000])
def test_no_pattern_of_indices_loses_its_slots(count: int) -> None:
    """At most 0.8 % in any step; random indices lose 0.09 % on average."""
    numel, steps = 1_000_000, 30
    for name, indices in patterns(numel, count).items():
        x, extraction, lost = torch.zeros(numel), HashedExtraction(), []
        x[indices] = 1.0
        for _ in range(steps):
            taken = extraction.extract(Accumulator(Accumulation(x.clone())), 0.5, len(indices))
            lost.append(1 - taken.nnz / len(indices))
        assert max(lost) <= 0.008, name
        assert sum(lost) / steps <= 0.002, name
