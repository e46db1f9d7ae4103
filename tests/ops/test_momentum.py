"""Momentum correction in the pass: the native library against the reference, and both against DGC's
equations."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse import ops
from hvd_sparse.ops import Accumulation, Momentum
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import INF, NAN, NUMELS, cut, generator, same_as_reference, vectors

FORMS = (False, True)


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("numel", NUMELS)
def test_select(native: NativeOps, numel: int, nesterov: bool) -> None:
    momentum = {"buffer": torch.randn(numel, generator=generator(1)), "nesterov": nesterov}
    for name, residual, gradient in vectors(numel):
        for threshold in (0.0, 2.5, INF):
            same_as_reference(
                native, "accumulate_select", residual, [gradient], threshold, **momentum, what=name
            )
        same_as_reference(
            native, "accumulate_select", residual, cut(gradient, 7), 1.5, **momentum, what=name
        )


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("numel", NUMELS)
def test_topk(native: NativeOps, numel: int, nesterov: bool) -> None:
    momentum = {"buffer": torch.randn(numel, generator=generator(1)), "nesterov": nesterov}
    for name, residual, gradient in vectors(numel):
        for k in (0, 17, numel):
            same_as_reference(
                native, "accumulate_topk", residual, [gradient], k, **momentum, what=name
            )


def test_large(native: NativeOps) -> None:
    """Large enough for sampled pivots and several tasks, over segments of all types."""
    numel = 2**18 + 3
    residual, gradient, buffer = torch.randn(3, numel, generator=generator())
    for nesterov in FORMS:
        same_as_reference(
            native,
            "accumulate_topk",
            residual,
            cut(gradient, 40),
            1000,
            buffer=buffer,
            nesterov=nesterov,
        )


def test_any_alignment(native: NativeOps) -> None:
    for offset in range(17):
        residual, gradient, buffer = torch.randn(3, 600, generator=generator(offset))
        v, u = residual[offset : offset + 300], buffer[17 - offset :][:300]
        outside = (residual.clone(), buffer.clone())
        expected = v.clone() + (u * 0.9 + gradient[3:303])
        native.accumulate_select(Accumulation(v, [gradient[3:303]], Momentum(u, 0.9)), INF)
        assert torch.equal(v, expected)
        outside[0][offset : offset + 300] = v
        outside[1][17 - offset :][:300] = u
        assert torch.equal(residual, outside[0])
        assert torch.equal(buffer, outside[1])


@pytest.mark.parametrize("nesterov", FORMS)
def test_equations(nesterov: bool) -> None:
    """Lin et al., equation (4), and Nesterov's form of it, in float64."""
    v, u, g = torch.randn(3, 1000, generator=generator())
    m = 0.75  # exact in float32
    if nesterov:
        new_u = m * (u.double() + g.double())
        new_v = v.double() + new_u + g.double()
    else:
        new_u = m * u.double() + g.double()
        new_v = v.double() + new_u
    indices, values = ops.accumulate_select(Accumulation(v, [g], Momentum(u, m, nesterov)), 1.0)
    selected = indices.long()
    torch.testing.assert_close(u.double(), new_u, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values.double(), new_v[selected], rtol=1e-5, atol=1e-6)
    assert (values.abs() >= 1.0).all()
    assert not v[selected].any()
    v[selected] = values
    torch.testing.assert_close(v.double(), new_v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("nesterov", FORMS)
def test_what_is_not_finite_leaves_no_trace(bad: float, nesterov: bool) -> None:
    v, u, g = torch.full((3,), 1.0), torch.full((3,), 2.0), torch.full((3,), 0.5)
    g[1] = bad
    accumulation = Accumulation(v, [g], Momentum(u, 0.5, nesterov))
    indices, values = ops.accumulate_select(accumulation, 100.0)
    assert indices.tolist() == [1]
    assert not values.isfinite().any()
    assert (v[1], u[1]) == (1.0, 2.0)
    assert (v[0], u[0]) != (1.0, 2.0)


def test_finite_momentum_survives_an_overflowing_sum() -> None:
    v, u = torch.full((2,), 3e38), torch.full((2,), 1e38)
    ops.accumulate_select(Accumulation(v, [torch.zeros(2)], Momentum(u, 0.9)), 1.0)
    assert (v == 3e38).all()
    assert (u == 1e38).all()
