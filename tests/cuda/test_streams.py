"""Streams on CUDA, their kernels run on the CPU (shim/shim.h), against the reference."""

from __future__ import annotations

import re

import pytest
import torch

from hvd_sparse.ops import reference
from hvd_sparse.ops.cuda import CudaOps
from tests.ops.cases import DTYPES, INF, NAN, assert_same, generator, stream, vectors

pytestmark = pytest.mark.slow  # the stand-in compiles every kernel

NUMEL = 70_001
"""Three blocks of words, in a bitmap of the indices."""


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_merge_sum(cuda: CudaOps, world_size: int) -> None:
    for nnz in (0, 3, 5000):
        streams = [stream(NUMEL, nnz, seed) for seed in range(world_size)]
        streams[-1] = stream(NUMEL, 100, 9)
        assert_same(cuda.merge_sum(streams, NUMEL), reference.merge_sum(streams, NUMEL))
    with_specials = [(torch.tensor([0, NUMEL - 1], dtype=torch.int32), torch.tensor([-0.0, NAN]))]
    streams = with_specials * world_size
    assert_same(cuda.merge_sum(streams, NUMEL), reference.merge_sum(streams, NUMEL))


def test_merge_sum_of_nothing(cuda: CudaOps) -> None:
    empty = (torch.empty(0, dtype=torch.int32), torch.empty(0))
    for numel in (0, 5, NUMEL):
        assert_same(cuda.merge_sum([empty, empty], numel), empty)


@pytest.mark.parametrize("nnz", [0, 1, 1000, 9000])
def test_filters(cuda: CudaOps, nnz: int) -> None:
    indices, values = stream(NUMEL, nnz, 3)
    for threshold in (0.0, 1.0, INF):
        assert_same(
            cuda.threshold_stream(indices, values, threshold),
            reference.threshold_stream(indices, values, threshold),
        )
    for other in (indices, indices[::3].contiguous(), indices[:0], stream(NUMEL, 4000, 4)[0]):
        assert_same(
            cuda.difference(indices, values, other), reference.difference(indices, values, other)
        )


@pytest.mark.parametrize("nnz", [0, 1, 3000])
def test_dense_vectors(cuda: CudaOps, nnz: int) -> None:
    indices, values = stream(NUMEL, nnz, 5)
    values = torch.cat([values[4:], torch.tensor([INF, NAN, 1e-42, 65520.0])])[:nnz]
    x = torch.randn(NUMEL, generator=generator())
    for dtype in DTYPES:
        ours, theirs = x.to(dtype), x.to(dtype)
        cuda.decode(ours, indices, values)
        reference.decode(theirs, indices, values)
        assert_same(ours, theirs, str(dtype))
        cuda.decode(ours[3:8200], *stream(8197, min(nnz, 900), 6))  # aligned nowhere
        reference.decode(theirs[3:8200], *stream(8197, min(nnz, 900), 6))
        assert_same(ours, theirs, str(dtype))
    ours, theirs = x.clone(), x.clone()
    for implementation, state in ((cuda, ours), (reference, theirs)):
        implementation.scatter_add(state, indices, values)
        implementation.take_at(state, indices[::2].contiguous())
    assert_same(ours, theirs)
    assert_same(cuda.take_at(ours, indices), reference.take_at(theirs, indices))
    assert_same(ours, theirs)


@pytest.mark.parametrize("numel", [1, 1000, 9001])
def test_kth_magnitude(cuda: CudaOps, numel: int) -> None:
    for name, x, _ in vectors(numel):
        for k in {1, (numel + 99) // 100, numel}:
            assert_same(cuda.kth_magnitude(x, k), reference.kth_magnitude(x, k), f"{name}, {k}")


@pytest.mark.parametrize("index", [-1, 4, -(2**31), 2**31 - 1])
def test_an_index_out_of_range_is_left_out_and_told(cuda: CudaOps, index: int) -> None:
    indices = torch.tensor([1, index], dtype=torch.int32)
    x, two = torch.arange(4.0), torch.full((2,), 5.0)
    told = re.escape(f"indices must be in [0, 4), got {index}: ")

    def seen() -> None:
        with pytest.raises(ValueError, match=told):
            cuda.kth_magnitude(x, 1)
        cuda.kth_magnitude(x, 1)  # once

    cuda.scatter_add(x, indices, two)
    assert x.tolist() == [0.0, 6.0, 2.0, 3.0]
    seen()
    assert cuda.take_at(x, indices).tolist() == [6.0, 0.0]
    seen()
    cuda.decode(x, indices, two)
    assert x.tolist() == [0.0, 5.0, 0.0, 0.0]
    seen()
    many = torch.zeros(100_000)
    if index not in range(many.numel()):
        both = (index, 9000) if index < 0 else (9000, index)
        cuda.decode(many, torch.tensor(both, dtype=torch.int32), two)
        assert many.nonzero().tolist() == [[9000]]
        with pytest.raises(ValueError, match=re.escape(f"in [0, 100000), got {index}: ")):
            cuda.kth_magnitude(x, 1)
    with pytest.raises(ValueError, match=told):
        cuda.merge_sum([(indices, two)], 4)
    cuda.merge_sum([(indices[:1], two[:1])], 4)
