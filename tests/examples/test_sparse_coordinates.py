"""Coordinate descent: its steps lower the objective, and end in its minimum."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from examples.sparse_coordinates import Columns, Descent, damping_of
from examples.sparse_linear import Samples, samples_of

DECAY = 0.01


def make_samples() -> Samples:
    """60 samples with 1 to 6 of 25 features; the last feature is in none."""
    choose = np.random.default_rng(5)
    rows = []
    for number in range(60):
        columns = np.sort(choose.choice(24, size=1 + number % 6, replace=False))
        rows.append((columns, choose.normal(size=len(columns))))
    return samples_of(rows, choose.choice([-1.0, 1.0], size=60).tolist(), 25)


def dense_objective(samples: Samples, weights: torch.Tensor) -> torch.Tensor:
    place, columns, values = samples.take(torch.arange(len(samples.labels)))
    matrix = torch.zeros(len(samples.labels), samples.dimension)
    matrix[place, columns] = values
    margins = samples.labels * (matrix @ weights)
    return torch.nn.functional.softplus(-margins).mean() + DECAY / 2 * weights.square().sum()


def test_columns_are_the_rows_once_more() -> None:
    samples = make_samples()
    columns = Columns(samples)
    assert columns.filled.tolist() == list(range(24))
    assert columns.longest_row == 6
    place, rows, values = columns.take(torch.tensor([7, 24, 3]))
    assert set(place.tolist()) == {0, 2}
    for column, at in ((7, 0), (3, 2)):
        expected = {}
        for row in range(60):
            _, there, entries = samples.take(torch.tensor([row]))
            for c, value in zip(there.tolist(), entries.tolist(), strict=True):
                if c == column:
                    expected[row] = value * float(samples.labels[row])
        found = dict(zip(rows[place == at].tolist(), values[place == at].tolist(), strict=True))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("drawn", [1, 4, 24])
def test_it_ends_in_the_minimum(drawn: int) -> None:
    samples = make_samples()
    columns = Columns(samples)
    damping = damping_of(columns.longest_row, drawn, len(columns.filled), 1)
    descent = Descent(samples, DECAY, damping, columns)
    generator = torch.Generator().manual_seed(drawn)
    objectives = [descent.objective()]
    assert objectives[0] == pytest.approx(np.log(2))
    for _ in range(200):
        for coordinates in columns.filled[torch.randperm(24, generator=generator)].split(drawn):
            descent.go(coordinates, descent.steps(coordinates))
        objectives.append(descent.objective())
    assert all(after <= before + 1e-6 for before, after in pairwise(objectives))
    weights = descent.weights.clone().requires_grad_()
    loss = dense_objective(samples, weights)
    assert objectives[-1] == pytest.approx(loss.item(), abs=1e-5)
    (gradient,) = torch.autograd.grad(loss, weights)
    assert float(gradient.abs().max()) < 1e-4


def test_steps_that_know_of_each_other_need_no_damping() -> None:
    assert damping_of(longest_row=50, drawn=1, slice_numel=1000, workers=1) == 1
    assert damping_of(longest_row=1, drawn=100, slice_numel=1000, workers=1) == 1
    wide = [damping_of(50, drawn, 1000, 4) for drawn in (1, 10, 100, 1000)]
    assert wide == sorted(wide)
    assert wide[-1] == pytest.approx(50)  # all coordinates at a time: full descent
