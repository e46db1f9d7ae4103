"""Synthetic streams: sorted, k entries, the same each time, and as crowded as asked for."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.lab.simulator import SyntheticStreams


@pytest.mark.parametrize("numel", [1, 5, 1000, 9001])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("skew", [0.0, 9.0, 1e6, 1e300])
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
def test_synthetic_streams_are_streams(
    numel: int, overlap: float, skew: float, density: float
) -> None:
    k = round(density * numel)
    source = SyntheticStreams(overlap, skew)
    one, other = (source.stream(rank, 3, numel, k) for rank in (0, 1))
    assert one.nnz == other.nnz == k
    assert bool((one.indices[1:] > one.indices[:-1]).all())
    assert k == 0 or 0 <= int(one.indices[0]) <= int(one.indices[-1]) < numel
    again = source.stream(0, 3, numel, k)
    assert torch.equal(again.indices, one.indices)
    assert torch.equal(again.values, one.values)
    common = len(set(one.indices.tolist()) & set(other.indices.tolist()))
    assert common >= round(overlap * k)


def test_a_region_and_a_skew_crowd_the_indices() -> None:
    assert int(SyntheticStreams(region=0.1).stream(0, 0, 10_000, 500).indices[-1]) < 1_000
    even, skewed = (
        SyntheticStreams(skew=skew).stream(0, 0, 10_000, 500).indices.float().median()
        for skew in (0.0, 3.0)
    )
    assert skewed < even / 2
    crowded = SyntheticStreams(skew=1e6).stream(0, 0, 10_000, 500).indices
    assert torch.equal(crowded, torch.arange(500).int())
