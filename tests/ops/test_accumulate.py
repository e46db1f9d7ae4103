"""Accumulation and selection: the native library against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_sparse.ops import Accumulation, reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import INF, NAN, NUMELS, assert_same, cut, generator, vectors


def check_select(
    native: NativeOps, residual: Tensor, gradients: list[Tensor], threshold: float, what: str = ""
) -> None:
    ours, theirs = residual.clone(), residual.clone()
    actual = native.accumulate_select(Accumulation(ours, gradients), threshold)
    expected = reference.accumulate_select(Accumulation(theirs, gradients), threshold)
    assert_same((*actual, ours), (*expected, theirs), f"{what}, threshold {threshold}")
    assert torch.isfinite(ours).all()


def check_topk(
    native: NativeOps,
    residual: Tensor,
    gradients: list[Tensor],
    k: int,
    pivots: tuple[float, ...],
    what: str = "",
) -> None:
    theirs = residual.clone()
    expected = reference.accumulate_topk(Accumulation(theirs, gradients), k)
    for pivot in pivots:
        ours = residual.clone()
        actual = native.accumulate_topk(Accumulation(ours, gradients), k, pivot)
        assert_same((*actual, ours), (*expected, theirs), f"{what}, k {k}, pivot {pivot}")
        assert torch.isfinite(ours).all()


@pytest.mark.parametrize("numel", NUMELS)
def test_select(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for threshold in (0.0, 2.5, INF, NAN):
            check_select(native, residual, [gradient], threshold, name)
        check_select(native, residual, cut(gradient, 7), 1.5, name)
        check_select(native, residual, [], 1.5, name)


@pytest.mark.parametrize("numel", NUMELS)
def test_topk(native: NativeOps, numel: int) -> None:
    for name, residual, gradient in vectors(numel):
        for k in {0, 1, 17, numel // 100, numel, numel + 1}:
            check_topk(native, residual, [gradient], k, (0.0, 2.0), name)
        # Which NaN a conversion makes of a NaN, and so their order, differs within torch itself.
        pieces = cut(torch.nan_to_num(gradient, INF, INF, -INF), 7)
        check_topk(native, residual, pieces, 17, (0.0,), name)


def test_large(native: NativeOps) -> None:
    """Large enough for sampled pivots and several tasks."""
    numel = 2**20 + 3
    random = generator()
    residual = torch.randn(numel, generator=random)
    gradient = torch.randn(numel, generator=random)
    check_select(native, residual, cut(gradient, 40), 4.0)
    check_topk(native, residual, [gradient], 1000, (0.0, 4.0, 1e-3, 1e9, INF, NAN, -1.0))


def test_large_where_a_sample_misleads(native: NativeOps) -> None:
    numel = 2**20 + 3
    ties = torch.full((numel,), 1.5)
    ties[::3] = -1.5
    check_topk(native, ties, [], 1000, (0.0, 1.0, 2.0))
    ties[5:200_000:1000] = INF
    check_topk(native, ties, [torch.zeros(numel)], 1000, (0.0, 1.0, 2.0))
    one_block = torch.zeros(numel)
    one_block[700_000:710_000] = torch.randn(10_000, generator=generator())
    for k in (1000, 20_000):
        check_topk(native, one_block, [], k, (0.0, 0.5, 100.0))


def test_non_finite_everywhere_and_over_the_limit(native: NativeOps) -> None:
    numel = 2**18
    gradient = torch.full((numel,), INF)
    gradient[::2] = NAN
    check_topk(native, torch.ones(numel), [gradient], 10, (0.0, 0.5))


def test_many_small_segments(native: NativeOps) -> None:
    numel = 200_000
    random = generator()
    residual = torch.randn(numel, generator=random)
    gradients = cut(torch.randn(numel, generator=random), 10_000)
    check_select(native, residual, gradients, 3.0)
    check_topk(native, residual, gradients, 500, (0.0, 2.5))


def test_any_alignment(native: NativeOps) -> None:
    for offset in range(17):
        residual, gradient = torch.randn(2, 600, generator=generator(offset))
        check_select(native, residual[offset:].clone(), [gradient[offset:]], 1.0)
        ours, theirs = residual.clone(), residual.clone()
        actual, expected = (
            ops.accumulate_select(Accumulation(x[offset : offset + 300], [gradient[3:303]]), 1.0)
            for ops, x in ((native, ours), (reference, theirs))
        )
        assert_same((*actual, ours), (*expected, theirs), f"offset {offset}")


@pytest.mark.parametrize("numel", [n for n in NUMELS if n > 0])
def test_kth_magnitude(native: NativeOps, numel: int) -> None:
    for name, x, _ in vectors(numel):
        for k in {1, (numel + 99) // 100, (numel + 1) // 2, numel}:
            assert_same(native.kth_magnitude(x, k), reference.kth_magnitude(x, k), f"{name}, {k}")


def test_kth_magnitude_leaves_its_argument_alone(native: NativeOps) -> None:
    x = torch.randn(100_000, generator=generator())
    x[7] = INF
    before = x.clone()
    native.kth_magnitude(x, 10)
    assert torch.equal(x, before)


@settings(deadline=None, max_examples=150)
@given(
    patterns=st.lists(
        st.sampled_from([0, 0x80000000, 1, 0x3F800000, 0xBF800000, 0x7F800000, 0x7FC00000])
        | st.integers(0, 2**32 - 1),
        min_size=1,
        max_size=120,
    ),
    k=st.integers(0, 130),
    pivot=st.floats(allow_nan=True),
)
def test_any_bits(patterns: list[int], k: int, pivot: float) -> None:
    signed = [p - 2**32 if p >= 2**31 else p for p in patterns]
    residual = torch.tensor(signed, dtype=torch.int32).view(torch.float32)
    ops = NativeOps()
    check_topk(ops, residual, [], k, (0.0, pivot))
    check_select(ops, residual, [residual.clone()], abs(pivot))


def test_mass_is_conserved(native: NativeOps) -> None:
    residual, gradient = torch.randn(2, 50_000, generator=generator())
    acc = residual + gradient
    indices, values, threshold = native.accumulate_topk(Accumulation(residual, [gradient]), 500)
    residual[indices.long()] += values
    assert torch.equal(residual, acc)
    assert values.abs().min() == threshold
