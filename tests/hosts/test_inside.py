"""The exchange inside a host, over a stand-in for NCCL whose devices are threads; shards."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from hvd_sparse.errors import TransportError
from hvd_sparse.hosts import Grid, Hosts
from hvd_sparse.hosts.inside import OverDevices, shard_bounds
from hvd_sparse.hosts.shared import SharedHost
from hvd_sparse.transports.nccl import NcclTransport
from tests.grids import regular_grid
from tests.laws.test_two_levels import Steps, check_laws, engine_of, trained
from tests.transports.test_nccl import over_nccl

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
MIXED = Grid(((3, 0), (1, 2)), 0, 0)
"""A host whose local ranks are not in the ranks' order."""


def place_in(grid: Grid, rank: int) -> Grid:
    [(host, local)] = [(h, row.index(rank)) for h, row in enumerate(grid.ranks) if rank in row]
    return Grid(grid.ranks, host, local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 5, 64, 1000])
@pytest.mark.parametrize("grid", [regular_grid(2, 2, 0), regular_grid(1, 3, 0), MIXED], ids=str)
def test_the_bits_are_those_of_the_hosts_memory(grid: Grid, numel: int, dtype: torch.dtype) -> None:
    def rank(transport: NcclTransport) -> None:
        hosts = Hosts(transport, place_in(grid, transport.rank))
        ours = hosts.exchange_of(numel, str(dtype), CPU)
        assert isinstance(ours, OverDevices)
        theirs = SharedHost(transport, hosts.inside, numel, str(dtype))
        generator = torch.Generator().manual_seed(transport.rank)
        whole = torch.randn(numel, 2, generator=generator).to(dtype).T[0]  # strided
        pieces = list(whole.split(numel // 3 + 1))
        for _ in range(2):
            assert torch.equal(ours.reduce_scatter(pieces), theirs.reduce_scatter(pieces))

    over_nccl(grid.hosts * grid.local_size, rank)


@pytest.mark.parametrize("grid", [(2, 2), (1, 2), (3, 2), (2, 1)], ids=str)
def test_laws(grid: tuple[int, int]) -> None:
    def rank(transport: NcclTransport) -> Steps:
        return trained(engine_of(transport, grid), transport.rank, 4)

    check_laws(over_nccl(grid[0] * grid[1], rank), 4)


def test_a_rank_that_does_not_come_is_told_by_all() -> None:
    def rank(transport: NcclTransport) -> Any:
        hosts = Hosts(transport, regular_grid(1, 3, transport.rank))
        inside = hosts.exchange_of(100, "torch.float32", CPU)
        if transport.rank == 2:
            return None
        with pytest.raises(TransportError) as caught:
            inside.reduce_scatter([torch.ones(100)])
        return str(caught.value)

    says = over_nccl(3, rank, timeout_s=1.0)
    assert all("it has waited" in each or "gave the transport up" in each for each in says[:2])


@pytest.mark.parametrize("numel", [0, 1, 5, 16, 17, 100, 1000, 2**16 + 1])
@pytest.mark.parametrize("local_size", [1, 2, 3, 4, 7])
def test_shards_cover_a_vector_and_differ_by_a_line(numel: int, local_size: int) -> None:
    bounds = shard_bounds(numel, local_size)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert len(sizes) == local_size
    assert sum(sizes) == numel
    assert min(sizes) >= 0
    assert all(bound % 16 == 0 or bound == numel for bound in bounds)
    assert max(sizes) <= numel / local_size + 16
