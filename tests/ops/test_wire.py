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
def test_gaps(library: NativeOps, name: str) -> None:
    indices, start = INDICES[name]
    code = library.gap_encode(indices, start)
    assert_same(code, reference.gap_encode(indices, start))
    for implementation in (library, reference):
        assert_same(implementation.gap_decode(code, indices.numel(), start, TOP), indices)


@settings(deadline=None, max_examples=100)
@given(st.sets(st.integers(0, 5000), max_size=400), st.integers(0, 100))
def test_gaps_of_any_indices(places: set[int], start: int) -> None:
    library = NativeOps()
    indices = ascending(*sorted(place + start for place in places))
    code = library.gap_encode(indices, start)
    assert_same(code, reference.gap_encode(indices, start))
    assert_same(library.gap_decode(code, len(places), start, 6000), indices)


def test_gaps_of_random_indices_are_short() -> None:
    """At density 0.01, log2(100) + 1.44 bits of entropy; blocks take little more than two above."""
    indices = INDICES["random"][0]
    assert ops.on_host().gap_encode(indices, 5000).numel() < 10_000 * 11 / 8


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
    library: NativeOps, indices: torch.Tensor, start: int
) -> None:
    for implementation in (library, reference):
        with pytest.raises(ValueError, match="strictly ascending"):
            implementation.gap_encode(indices, start)


def test_gaps_refuse_a_code_of_something_else(library: NativeOps) -> None:
    indices, start = INDICES["random"]
    code = library.gap_encode(indices, start)
    nnz = indices.numel()
    wide = code.clone()
    wide[0] = 40
    for implementation in (library, reference):
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
def test_qsgd(library: NativeOps, numel: int, bits: int, bucket_numel: int) -> None:
    for name, x, _ in vectors(numel):
        codes, scales = library.qsgd_quantize(x, bits, bucket_numel, 2**63 + 12345)
        expected = reference.qsgd_quantize(x, bits, bucket_numel, 2**63 + 12345)
        assert_same((codes, scales), expected, name)
        values = library.qsgd_dequantize(codes, scales, numel, bits, bucket_numel)
        assert_same(values, reference.qsgd_dequantize(*expected, numel, bits, bucket_numel), name)
        largest = x.abs().max() if numel else 0.0
        if x.isfinite().all() and numel:
            step = float(largest) / (2 ** (bits - 1) - 1)
            assert float((values - x).abs().max()) <= step * 1.0001 + 1e-36, name


def rounded(x: torch.Tensor, bits: int, seed: int) -> torch.Tensor:
    """What a receiver reads of values in buckets of 512."""
    quantised = ops.on_host().qsgd_quantize(x, bits, 512, seed)
    return ops.on_host().qsgd_dequantize(*quantised, x.numel(), bits, 512)


def test_qsgd_keeps_zeros_and_marks_what_is_not_finite() -> None:
    x = torch.zeros(1024)
    x[3], x[700], x[900] = 1.0, INF, NAN
    values = rounded(x, 4, 1)
    assert values[3] == 1.0
    assert int(values[:512].count_nonzero()) == 1
    assert bool(values[512:].isnan().all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_keeps_the_largest_values_finite(library: NativeOps, bits: int) -> None:
    x = torch.tensor([3.4028235e38, -3.4028235e38, 3.402e38, 1.0])
    quantised = library.qsgd_quantize(x, bits, 512, 5)
    assert_same(quantised, reference.qsgd_quantize(x, bits, 512, 5))
    assert bool(library.qsgd_dequantize(*quantised, 4, bits, 512).isfinite().all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_unbiased(bits: int) -> None:
    """The mean over many seeds is within five standard errors of every value."""
    x = torch.randn(512, generator=generator(bits))
    draws = 4000
    total = torch.zeros(512, dtype=torch.float64)
    for seed in range(draws):
        total += rounded(x, bits, seed << 32)
    step = float(x.abs().max()) / (2 ** (bits - 1) - 1)
    assert float((total / draws - x).abs().max()) < 5 * step / 2 / draws**0.5


def test_qsgd_rounds_differently_by_seed_and_place() -> None:
    x = torch.full((512,), 0.5)
    x[0] = 1.0
    up = rounded(x, 2, 1)[1:]
    assert 200 < int(up.count_nonzero()) < 311
    other = rounded(x, 2, 2)[1:]
    assert 200 < int((up != other).count_nonzero()) < 311


def test_forms_that_no_wire_has_are_refused(library: NativeOps) -> None:
    x = torch.zeros(8)
    quantised = library.qsgd_quantize(x, 4, 512, 0)
    for bits, bucket_numel in ((3, 512), (4, 100)):
        with pytest.raises(ValueError, match="refused its arguments"):
            library.qsgd_quantize(x, bits, bucket_numel, 0)
        with pytest.raises(ValueError, match="refused its arguments"):
            library.qsgd_dequantize(*quantised, 8, bits, bucket_numel)
