"""Every collective on awkward streams in worlds of every shape, against a float64 dense sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from hvd_sparse.collectives import (
    Collective,
    DsarSplitAllgather,
    GTopk,
    OkTopk,
    Reduction,
    SsarRecursiveDouble,
    SsarSplitAllgather,
    TopkAllgather,
    TopkDsa,
)
from hvd_sparse.stream import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from tests.collectives.cases import (
    WORLDS,
    assert_identical,
    assert_mass_conserved,
    case_stream,
    dense,
    reduce_cases,
)

LOSSLESS: dict[str, Callable[..., Collective]] = {
    "topk_allgather": TopkAllgather,
    "ssar_recursive_double": SsarRecursiveDouble,
    "ssar_split_allgather": SsarSplitAllgather,
    "dsar_split_allgather": DsarSplitAllgather,
    "topk_dsa": TopkDsa,
}
"""These apply all that goes in."""
SELECTIVE: dict[str, Callable[..., Collective]] = {
    "gtopk": GTopk,
    "oktopk": OkTopk,
    "oktopk-always-balanced": partial(OkTopk, balance_factor=1.0),
}
"""These apply about k of it."""
K = 12


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_sums(name: str, world_size: int) -> None:
    outcomes = reduce_cases(
        world_size,
        lambda transport, case: LOSSLESS[name](transport, case.numel, min(K, case.numel)),
    )
    for case, reductions in outcomes:
        total = assert_identical(reductions, case.name)
        expected = sum(dense(case_stream(case, rank, world_size)) for rank in range(world_size))
        assert torch.equal(dense(total), expected), case.name
        assert not any(reduction.returned.nnz for reduction in reductions), case.name


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", SELECTIVE)
def test_selective_sums(name: str, world_size: int) -> None:
    outcomes = reduce_cases(
        world_size,
        lambda transport, case: SELECTIVE[name](transport, case.numel, min(K, case.numel)),
        steps=2,
    )
    for case, reductions in outcomes:
        total = assert_identical(reductions, case.name)
        assert_mass_conserved(case, reductions)
        if case.numel > K:
            assert total.nnz <= 1.1 * K, case.name


def test_gtopk_returns_what_a_node_dropped_and_another_path_applied() -> None:
    """Ranks 2 and 3 lose index 5 at their node, ranks 0 and 1 bring it into the result."""
    brought = [
        {5: 10.0, 6: 1.0},
        {5: 10.0, 7: 1.0},
        {5: 2.0, 8: 3.0},
        {5: 2.0, 8: 3.0},
    ]

    def worker(transport: Transport) -> Reduction:
        own = brought[transport.rank]
        stream = SparseStream(
            torch.tensor(list(own), dtype=torch.int32), torch.tensor(list(own.values())), 10
        )
        return GTopk(transport, 10, 1).reduce(stream)

    reductions = run_ranks(4, worker)
    assert dense(reductions[0].reduced)[5] == 20.0
    returned = sum(dense(r.returned) for r in reductions)
    assert returned[5] == 4.0
    assert returned.sum() == 4.0 + 1.0 + 1.0 + 6.0
