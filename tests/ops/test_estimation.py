"""What thresholds are estimated from: the native library against the reference."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import NUMELS, cut, generator, same_as_reference, vectors


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
