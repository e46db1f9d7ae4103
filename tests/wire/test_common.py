"""What of a stream is at the indices of another one, as rounding's differences are sorted out."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.streams import SparseStream

NUMEL = 10_000


def random_stream(nnz: int, seed: int) -> SparseStream:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(NUMEL, generator=generator)[:nnz].sort().values.int()
    return SparseStream(indices, torch.randn(nnz, generator=generator), NUMEL)


@pytest.mark.parametrize("nnz", [0, 1, 7, 500, 10_000])
@pytest.mark.parametrize("others", [0, 1, 7, 500, 10_000])
def test_common_with(nnz: int, others: int) -> None:
    stream, other = random_stream(nnz, 1), random_stream(others, 2)
    common = stream.common_with(other.indices)
    dense = torch.zeros(NUMEL, dtype=torch.bool).index_fill(0, other.indices.long(), True)
    expected = stream.where(dense[stream.indices.long()])
    assert torch.equal(common.indices, expected.indices)
    assert torch.equal(common.values, expected.values)
    assert common.numel == NUMEL
