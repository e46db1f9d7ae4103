"""What thresholds are estimated from: the native library against the reference, and statistics."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_sparse import ops
from hvd_sparse.ops import Momentum, reference
from hvd_sparse.ops.moments import Moments
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import INF, NAN, NUMELS, cut, generator, same_as_reference, vectors

THRESHOLDS = (0.0, 2.5, 1e-42, 1.0, 1.5, INF, NAN, 1e30, 0.1, 0.2, 0.3)


def assert_close(actual: Moments, expected: Moments, magnitude_scale: float, what: str) -> None:
    """Counts are the same, and sums to float64's rounding, though added in another order."""
    assert actual.count == expected.count, what
    assert actual.largest == expected.largest, what
    for name in ("sum", "sum_of_squares", "sum_of_magnitudes", "sum_of_logs"):
        one, other = getattr(actual, name), getattr(expected, name)
        scale = {"sum": expected.sum_of_magnitudes, "sum_of_logs": 100.0 * expected.count}
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9 * scale.get(name, 0.0)), (what, name)


@pytest.mark.parametrize("numel", NUMELS)
def test_sample(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for start, stride, run in ((0, 1, 1), (3, 100, 4), (0, 64, 64), (99_999, 100_000, 7)):
            for gradients in ([gradient], cut(gradient, 7), []):
                same_as_reference(
                    native, "sample_accumulator", residual, gradients, start, stride, run, what=name
                )


@pytest.mark.parametrize("numel", NUMELS)
def test_counts(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for gradients in ([gradient], cut(gradient, 7), []):
            same_as_reference(native, "count_at_least", residual, gradients, THRESHOLDS, what=name)
    assert native.count_at_least(torch.zeros(numel), [], []) == []


@pytest.mark.parametrize("numel", NUMELS)
def test_moments(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for threshold in (0.0, 1.0, INF):
            for gradients in ([gradient], cut(gradient, 7), []):
                actual = native.accumulator_moments(residual, gradients, threshold)
                expected = reference.accumulator_moments(residual, gradients, threshold)
                assert_close(actual, expected, 1.0, f"{name}, threshold {threshold}")


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum(native: NativeOps, nesterov: bool) -> None:
    numel = 2**18 + 3
    residual, gradient, buffer = torch.randn(3, numel, generator=generator())
    pieces = cut(gradient, 40)
    for op, arguments in (
        ("sample_accumulator", (5, 64, 4)),
        ("count_at_least", (THRESHOLDS,)),
    ):
        same_as_reference(
            native, op, residual, pieces, *arguments, buffer=buffer, nesterov=nesterov
        )
    momentum = Momentum(buffer, 0.9, nesterov)
    before = [x.clone() for x in (residual, buffer)]
    assert_close(
        native.accumulator_moments(residual, pieces, 0.5, momentum),
        reference.accumulator_moments(residual, pieces, 0.5, momentum),
        1.0,
        "",
    )
    assert torch.equal(residual, before[0])
    assert torch.equal(buffer, before[1])


def test_moments_do_not_depend_on_threads() -> None:
    residual, gradient = torch.randn(2, 300_000, generator=generator())
    one, *others = [
        NativeOps(threads=threads).accumulator_moments(residual, [gradient])
        for threads in (1, 2, 3)
    ]
    assert all(other == one for other in others)


def test_moments_by_hand() -> None:
    x = torch.tensor([3.0, -4.0, 0.0, 0.5, INF, NAN, -0.0])
    moments = ops.accumulator_moments(x, [], 1.0)
    assert (moments.count, moments.sum, moments.sum_of_squares) == (2, -1.0, 25.0)
    assert (moments.sum_of_magnitudes, moments.largest) == (7.0, 4.0)
    assert moments.sum_of_logs == pytest.approx(math.log(12.0))
    empty = ops.accumulator_moments(torch.zeros(0), [])
    assert empty == Moments(0, 0.0, 0.0, 0.0, 0.0, 0.0)
