"""What thresholds are estimated from: the native library against the reference."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.ops import reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import (
    INF,
    NUMELS,
    assert_same,
    cut,
    generator,
    misleading,
    same_as_reference,
    vectors,
)


@pytest.mark.parametrize("numel", NUMELS)
def test_sample(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for share, run, seed in ((1.0, 1, 0), (0.3, 4, 2**64 - 1), (1.0, 64, 7), (0.01, 7, 2**32)):
            runs = int(share * (numel // run))
            for gradients in ([gradient], cut(gradient, 7), []):
                same_as_reference(
                    native, "sample_accumulator", residual, gradients, runs, run, seed, what=name
                )


@pytest.mark.parametrize("nesterov", [False, True])
def test_sample_with_momentum(native: NativeOps, nesterov: bool) -> None:
    residual, gradient, buffer = torch.randn(3, 2**18 + 3, generator=generator())
    same_as_reference(
        native,
        "sample_accumulator",
        residual,
        cut(gradient, 40),
        5_000,
        8,
        64,
        buffer=buffer,
        nesterov=nesterov,
    )


@pytest.mark.parametrize("numel", [n for n in NUMELS if n > 0])
def test_kth_magnitude(native: NativeOps, numel: int) -> None:
    for name, x, _ in vectors(numel):
        for k in {1, (numel + 99) // 100, (numel + 1) // 2, numel}:
            assert_same(native.kth_magnitude(x, k), reference.kth_magnitude(x, k), f"{name}, {k}")


def test_kth_magnitude_where_a_sample_misleads(native: NativeOps) -> None:
    for name, x in misleading(2**20 + 3):
        for k in (1000, 10_000):
            assert_same(native.kth_magnitude(x, k), reference.kth_magnitude(x, k), f"{name}, {k}")


def test_kth_magnitude_leaves_its_argument_alone(native: NativeOps) -> None:
    x = torch.randn(100_000, generator=generator())
    x[7] = INF
    before = x.clone()
    native.kth_magnitude(x, 10)
    assert torch.equal(x, before)
