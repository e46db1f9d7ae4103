"""What thresholds are estimated from: the native library against the reference."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import NUMELS, cut, generator, same_as_reference, vectors


@pytest.mark.parametrize("numel", NUMELS)
def test_sample(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for start, stride, run in ((0, 1, 1), (3, 100, 4), (0, 64, 64), (99_999, 100_000, 7)):
            for gradients in ([gradient], cut(gradient, 7), []):
                same_as_reference(
                    native, "sample_accumulator", residual, gradients, start, stride, run, what=name
                )


@pytest.mark.parametrize("nesterov", [False, True])
def test_sample_with_momentum(native: NativeOps, nesterov: bool) -> None:
    residual, gradient, buffer = torch.randn(3, 2**18 + 3, generator=generator())
    same_as_reference(
        native,
        "sample_accumulator",
        residual,
        cut(gradient, 40),
        5,
        64,
        4,
        buffer=buffer,
        nesterov=nesterov,
    )
