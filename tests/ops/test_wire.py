"""Operations for the wire: the native library against the reference, and their laws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_sparse import ops
from hvd_sparse.ops import reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import INF, NAN, NUMELS, assert_same, generator, vectors

TOP = 2**31 - 1


def ascending(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32)


INDICES = {
    "none": (ascending(), 0),
    "one": (ascending(7), 7),
    "last": (ascending(TOP - 1), 0),
    "both ends": (ascending(0, TOP - 1), 0),
    "consecutive": (torch.arange(1000, 2000, dtype=torch.int32), 1000),
    "one block": (torch.arange(0, 128 * 9, 9, dtype=torch.int32), 0),
    "a block and one": (torch.arange(0, 129 * 9, 9, dtype=torch.int32), 0),
    "wide and narrow": (torch.cat([torch.arange(300), torch.arange(10**6, TOP, 10**7)]).int(), 0),
    "random": (
        torch.randperm(10**6, generator=generator())[:10_000].sort().values.int() + 5000,
        5000,
    ),
}


@pytest.mark.parametrize("name", INDICES)
def test_gaps(native: NativeOps, name: str) -> None:
    indices, start = INDICES[name]
    code = native.gap_encode(indices, start)
    assert_same(code, reference.gap_encode(indices, start))
    for implementation in (native, reference):
        assert_same(implementation.gap_decode(code, indices.numel(), start, TOP), indices)


@settings(deadline=None, max_examples=100)
@given(st.sets(st.integers(0, 5000), max_size=400), st.integers(0, 100))
def test_gaps_of_any_indices(places: set[int], start: int) -> None:
    native = NativeOps()
    indices = ascending(*sorted(place + start for place in places))
    code = native.gap_encode(indices, start)
    assert_same(code, reference.gap_encode(indices, start))
    assert_same(native.gap_decode(code, len(places), start, 6000), indices)


def test_gaps_of_random_indices_are_short() -> None:
    """At density 0.01, log2(100) + 1.44 bits of entropy; blocks take little more than two above."""
    indices = INDICES["random"][0]
    assert ops.gap_encode(indices, 5000).numel() < 10_000 * 11 / 8


@pytest.mark.parametrize(
    ("indices", "start"),
    [
        (ascending(3, 3), 0),
        (ascending(4, 3), 0),
        (ascending(4), 5),
        (torch.cat([torch.arange(128), torch.arange(127, 200)]).int(), 0),
    ],
)
def test_gaps_refuse_what_does_not_ascend(
    native: NativeOps, indices: torch.Tensor, start: int
) -> None:
    for implementation in (native, reference):
        with pytest.raises(ValueError, match="strictly ascending"):
            implementation.gap_encode(indices, start)


def test_gaps_refuse_a_code_of_something_else(native: NativeOps) -> None:
    indices, start = INDICES["random"]
    code = native.gap_encode(indices, start)
    nnz = indices.numel()
    wide = code.clone()
    wide[0] = 40
    for implementation in (native, reference):
        for bad, count, stop in (
            (code[:-1], nnz, TOP),
            (torch.cat([code, code[:1]]), nnz, TOP),
            (code, nnz - 1, TOP),
            (code, nnz, int(indices[-1])),
            (code[:10], nnz, TOP),
            (wide, nnz, TOP),
        ):
            with pytest.raises(ValueError, match="of a code"):
                implementation.gap_decode(bad, count, start, stop)


@pytest.mark.parametrize("bucket_numel", [512, 1024])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("numel", NUMELS)
def test_qsgd(native: NativeOps, numel: int, bits: int, bucket_numel: int) -> None:
    for name, x, _ in vectors(numel):
        codes, scales = native.qsgd_quantize(x, bits, bucket_numel, 2**63 + 12345)
        expected = reference.qsgd_quantize(x, bits, bucket_numel, 2**63 + 12345)
        assert_same((codes, scales), expected, name)
        values = native.qsgd_dequantize(codes, scales, numel, bits, bucket_numel)
        assert_same(values, reference.qsgd_dequantize(*expected, numel, bits, bucket_numel), name)
        largest = x.abs().max() if numel else 0.0
        if x.isfinite().all() and numel:
            step = float(largest) / (2 ** (bits - 1) - 1)
            assert float((values - x).abs().max()) <= step * 1.0001 + 1e-36, name


def test_qsgd_keeps_zeros_and_marks_what_is_not_finite() -> None:
    x = torch.zeros(1024)
    x[3], x[700], x[900] = 1.0, INF, NAN
    values = ops.qsgd_dequantize(*ops.qsgd_quantize(x, 4, 512, 1), 1024, 4, 512)
    assert values[3] == 1.0
    assert int(values[:512].count_nonzero()) == 1
    assert bool(values[512:].isnan().all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_keeps_the_largest_values_finite(native: NativeOps, bits: int) -> None:
    x = torch.tensor([3.4028235e38, -3.4028235e38, 3.402e38, 1.0])
    quantised = native.qsgd_quantize(x, bits, 512, 5)
    assert_same(quantised, reference.qsgd_quantize(x, bits, 512, 5))
    assert bool(native.qsgd_dequantize(*quantised, 4, bits, 512).isfinite().all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased(bits: int) -> None:
    """The mean over many seeds is within five standard errors of every value."""
    x = torch.randn(512, generator=generator(bits))
    draws = 4000
    total = torch.zeros(512, dtype=torch.float64)
    for seed in range(draws):
        total += ops.qsgd_dequantize(*ops.qsgd_quantize(x, bits, 512, seed << 32), 512, bits, 512)
    step = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    assert float((total / draws - x).abs().max()) < 5 * step / 2 / draws**0.5


def test_qsgd_rounds_differently_by_seed_and_place() -> None:
    x = torch.full((512,), 0.5)
    x[0] = 1.0
    up = ops.qsgd_dequantize(*ops.qsgd_quantize(x, 2, 512, 1), 512, 2, 512)[1:]
    assert 200 < int(up.count_nonzero()) < 311
    other = ops.qsgd_dequantize(*ops.qsgd_quantize(x, 2, 512, 2), 512, 2, 512)[1:]
    assert 200 < int((up != other).count_nonzero()) < 311


def test_arguments_are_named() -> None:
    x = torch.zeros(8)
    with pytest.raises(ValueError, match=r"bits must be one of \(2, 4, 8\), got 3"):
        ops.qsgd_quantize(x, 3, 512, 0)
    with pytest.raises(ValueError, match=r"bucket_numel must be one of .*, got 100"):
        ops.qsgd_quantize(x, 4, 100, 0)
    with pytest.raises(ValueError, match="seed must be in"):
        ops.qsgd_quantize(x, 4, 512, -1)
    with pytest.raises(ValueError, match="codes and scales of 9 values"):
        ops.qsgd_dequantize(*ops.qsgd_quantize(x, 4, 512, 0), 9, 4, 512)
    with pytest.raises(TypeError, match="indices must be int32"):
        ops.gap_encode(torch.zeros(3), 0)
    with pytest.raises(ValueError, match=r"stop must be in \[5"):
        ops.gap_decode(torch.zeros(0, dtype=torch.uint8), 0, 5, 4)
