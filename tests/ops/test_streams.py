"""Operations on streams: the native library against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_sparse.ops import reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import DENORMAL, DTYPES, INF, NAN, assert_same, generator, stream
from tests.ops.on_device import OnDevice

NUMEL = 2**20 + 3
Stream = tuple[torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("nnz", [0, 3, 1000, 40_000])
def test_merge_sum(native: NativeOps, world_size: int, nnz: int) -> None:
    streams = [stream(NUMEL, nnz, seed) for seed in range(world_size)]
    assert_same(native.merge_sum(streams, NUMEL), reference.merge_sum(streams, NUMEL))


def test_merge_sum_of_uneven_streams(native: NativeOps) -> None:
    empty = stream(NUMEL, 0, 0)
    everywhere = stream(200_000, 200_000, 1)
    one_region = (stream(1000, 700, 2)[0] + 500_000, stream(1000, 700, 2)[1])
    last = (torch.tensor([NUMEL - 1], dtype=torch.int32), torch.tensor([NAN]))
    for streams in (
        [empty, everywhere, one_region, empty, last],
        [everywhere, everywhere, everywhere],
        [empty, one_region],
        [empty, empty, last],
        [last, last],
    ):
        assert_same(native.merge_sum(streams, NUMEL), reference.merge_sum(streams, NUMEL))


def test_merge_sum_adds_in_the_order_of_the_list(native: NativeOps) -> None:
    indices = torch.tensor([3], dtype=torch.int32)
    for order, total in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        streams = [(indices, torch.tensor([value])) for value in order]
        assert_same(native.merge_sum(streams, 10), (indices, torch.tensor([total])))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0)])
def test_merge_sum_of_streams_that_follow_one_another(
    native: NativeOps, order: tuple[int, ...]
) -> None:
    """Neighbours that touch, in any order; and one index too many for it."""
    whole = stream(NUMEL, 9000, 5)
    cuts = [slice(0, 2000), slice(2000, 2001), slice(2001, 9000)]
    streams = [(whole[0][cuts[i]].contiguous(), whole[1][cuts[i]].contiguous()) for i in order]
    assert_same(native.merge_sum(streams, NUMEL), reference.merge_sum(streams, NUMEL))
    streams.append((streams[0][0][-1:], torch.ones(1)))
    assert_same(native.merge_sum(streams, NUMEL), reference.merge_sum(streams, NUMEL))


def test_merge_sum_at_the_end_of_the_index_range(native: NativeOps) -> None:
    numel = 2**31 - 1
    indices = torch.tensor([0, 5, numel - 1], dtype=torch.int32)
    for world_size in (2, 3):
        merged = native.merge_sum([(indices, torch.ones(3))] * world_size, numel)
        assert_same(merged, (indices, torch.full((3,), float(world_size))))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sets(st.integers(0, 200)), min_size=1, max_size=5), st.sets(st.integers(0, 200)))
def test_any_streams(supports: list[set[int]], other: set[int]) -> None:
    ops = NativeOps()
    streams: list[Stream] = []
    for seed, support in enumerate(supports):
        indices = torch.tensor(sorted(support), dtype=torch.int32)
        streams.append((indices, torch.randn(len(support), generator=generator(seed))))
    total = ops.merge_sum(streams, 201)
    assert_same(total, reference.merge_sum(streams, 201))
    without = torch.tensor(sorted(other), dtype=torch.int32)
    assert_same(ops.difference(*total, without), reference.difference(*total, without))


@pytest.mark.parametrize("nnz", [0, 1, 100, 5000])
@pytest.mark.parametrize("other_nnz", [0, 1, 100, 5000])
def test_difference(native: NativeOps, nnz: int, other_nnz: int) -> None:
    """Lengths apart enough for the galloping searches, both ways."""
    one, other = stream(20_000, nnz, 1), stream(20_000, other_nnz, 2)
    assert_same(native.difference(*one, other[0]), reference.difference(*one, other[0]))
    assert native.difference(*one, one[0])[0].numel() == 0


@pytest.mark.parametrize("nnz", [0, 1, 15, 16, 17, 1000])
def test_threshold_stream(native: NativeOps, nnz: int) -> None:
    indices, values = stream(2000, nnz, 3)
    values = values.clone()
    values[3::5] = NAN
    values[4::5] = DENORMAL
    for threshold in (0.0, DENORMAL, 0.7, INF, NAN):
        assert_same(
            native.threshold_stream(indices, values, threshold),
            reference.threshold_stream(indices, values, threshold),
        )


@pytest.mark.parametrize("nnz", [0, 5, 100_000])
def test_scatter_add(native: NativeOps, nnz: int) -> None:
    indices, values = stream(NUMEL, nnz, 4)
    ours = torch.randn(NUMEL, generator=generator())
    theirs = ours.clone()
    native.scatter_add(ours, indices, values)
    reference.scatter_add(theirs, indices, values)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 5, 1000, 2**16 + 1, 2**21 + 5])
def test_decode(native: NativeOps, dtype: torch.dtype, numel: int) -> None:
    for nnz in {0, 1, numel // 50, min(numel, 70_000)}:
        indices, values = stream(numel, nnz, 5)
        for offset in (0, 3):  # the streaming stores want whole lines
            ours, theirs = (torch.full((numel + 3,), 7.0).to(dtype) for _ in range(2))
            native.decode(ours[offset : offset + numel], indices, values)
            reference.decode(theirs[offset : offset + numel], indices, values)
            assert_same(ours, theirs, f"nnz {nnz}, offset {offset}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rounds_to_nearest_even(native: NativeOps, dtype: torch.dtype) -> None:
    every_half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype_of_bits(dtype))
    exact = every_half.float()
    # Each value, the ones beside it, and the middles between it and its neighbours.
    step = torch.tensor([0, 1, -1, 2**12, 2**12 + 1, 2**12 - 1, 2**15, 2**15 + 1, 2**15 - 1])
    patterns = exact.view(torch.int32)[:, None] + step.to(torch.int32)
    values = patterns.reshape(-1).view(torch.float32).contiguous()
    indices = torch.arange(values.numel(), dtype=torch.int32)
    out = torch.empty(values.numel(), dtype=dtype)
    native.decode(out, indices, values)
    assert_same(out, values.to(dtype))


def dtype_of_bits(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type whose values are stepped through; float16's also serve float32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def test_bad_indices(native: NativeOps) -> None:
    if isinstance(native, OnDevice):
        pytest.skip("an index out of range stops a CUDA device (tests/cuda/test_streams.py)")
    values = torch.ones(3)
    for bad in ([-1, 0, 1], [0, 1, 10], [0, 1, 2**31 - 1]):
        indices = torch.tensor(bad, dtype=torch.int32)
        for ops in (native, reference):
            with pytest.raises(
                ValueError, match=r"indices must be strictly ascending in \[0, 10\)"
            ):
                ops.scatter_add(torch.zeros(10), indices, values)
            with pytest.raises(
                ValueError, match=r"indices must be strictly ascending in \[0, 10\)"
            ):
                ops.decode(torch.zeros(10), indices, values)
            with pytest.raises(ValueError, match=r"strictly ascending in \[0, 10\)"):
                ops.merge_sum([(indices, values)] * 3, 10)


def test_disorder_harms_nothing(native: NativeOps) -> None:
    """Out-of-order indices are a broken precondition: an error or garbage, but no stray write."""
    random = generator(9)
    for numel in (1000, 2 * 10**6):
        for _ in range(20):
            indices = torch.randint(numel, (50_000,), generator=random).to(torch.int32)
            indices[0], indices[-1] = 0, numel - 1
            values = torch.randn(50_000, generator=random)
            for world_size in (1, 2, 3):
                try:
                    merged, _ = native.merge_sum([(indices, values)] * world_size, numel)
                except ValueError:
                    continue
                assert merged.numel() <= 50_000 * world_size
            native.difference(indices, values, indices.flip(0).contiguous())
            try:
                native.decode(torch.empty(numel), indices, values)
            except ValueError:
                continue


@pytest.mark.parametrize("nnz", [0, 1, 1000, 100_000])
def test_take_at(native: NativeOps, nnz: int) -> None:
    x = torch.randn(NUMEL, generator=generator())
    indices, _ = stream(NUMEL, nnz, 1)
    for wanted in (indices, indices.flip(0)):
        ours, theirs = x.clone(), x.clone()
        assert_same(native.take_at(ours, wanted), reference.take_at(theirs, wanted))
        assert_same(ours, theirs)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_take_at_bad_indices(native: NativeOps, bad: int) -> None:
    if isinstance(native, OnDevice):
        pytest.skip("an index out of range stops a CUDA device (tests/cuda/test_streams.py)")
    indices = torch.tensor([0, bad], dtype=torch.int32)
    with pytest.raises(ValueError, match="indices must be"):
        native.take_at(torch.zeros(5), indices)
