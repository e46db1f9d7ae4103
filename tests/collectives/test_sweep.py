"""Every collective on awkward streams in worlds of every shape, against a float64 dense sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from hvd_sparse.collectives import Collective, GTopk, IndexUnion, OkTopk, Reduction
from hvd_sparse.collectives.registry import ALGORITHMS
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from hvd_sparse.wire import WIRES, CompactWire, Wire
from tests.collectives.cases import (
    CASES,
    WORLDS,
    Case,
    assert_identical,
    assert_mass_conserved,
    case_stream,
    random_stream,
    reduce_cases,
)
from tests.streams import dense

OF_STREAMS = [a for a in ALGORITHMS if not issubclass(a.collective, IndexUnion)]
"""Those that sum streams; the others sum accumulators, for which tests/laws has the sweep."""
LOSSLESS: dict[str, Callable[..., Collective]] = {
    a.name: a.collective for a in OF_STREAMS if a.is_lossless
}
"""These apply all that goes in."""
SELECTIVE: dict[str, Callable[..., Collective]] = {
    **{a.name: a.collective for a in OF_STREAMS if not a.is_lossless},
    "oktopk, always balanced": partial(OkTopk, balance_factor=1.0),
}
"""These apply about k of it."""
WITH_WIRES = {name: build for name, build in {**LOSSLESS, **SELECTIVE}.items() if name != "dense"}
"""The dense allreduce has the plain wire only."""
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
        there = sum(dense(case_stream(case, rank, world_size)) for rank in range(world_size))
        assert total.nnz > 0 or not there.count_nonzero(), case.name


TESTED_WIRES = {
    wire.name: wire
    for wire in [
        *(WIRES[name] for name in WIRES if name != "float32"),
        CompactWire("float16", "gap", dense_values="qsgd2"),
    ]
}


def check_wire(name: str, world_size: int, wire_of: Callable[[Case], Wire]) -> None:
    build = WITH_WIRES[name]
    outcomes = reduce_cases(
        world_size,
        lambda transport, case: build(
            transport, case.numel, min(K, case.numel), wire=wire_of(case)
        ),
    )
    for case, reductions in outcomes:
        what = f"{case.name} over {wire_of(case).name}"
        assert_identical(reductions, what)
        assert_mass_conserved(case, reductions, rtol=1e-6 * world_size)
        if wire_of(case).is_lossless and name in LOSSLESS:
            assert not any(reduction.returned.nnz for reduction in reductions), what


@pytest.mark.parametrize("name", WITH_WIRES)
@pytest.mark.parametrize("wire", TESTED_WIRES)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_wire_conserves_mass_and_keeps_ranks_identical(
    world_size: int, wire: str, name: str
) -> None:
    check_wire(name, world_size, lambda case: TESTED_WIRES[wire])


@pytest.mark.parametrize("name", WITH_WIRES)
@pytest.mark.parametrize("world_size", [P for P in WORLDS if P not in (2, 3, 5)])
def test_wires_in_every_world(world_size: int, name: str) -> None:
    """Each case over another wire; from world to world they change places."""
    wires = list(TESTED_WIRES.values())
    check_wire(name, world_size, lambda case: wires[(CASES.index(case) + world_size) % len(wires)])


@pytest.mark.parametrize("name", WITH_WIRES)
@pytest.mark.parametrize("spoil", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("wire", ["float32+gap", "float16+gap", "bfloat16", "qsgd8+gap"])
def test_what_is_not_finite_reaches_every_rank(name: str, wire: str, spoil: float) -> None:
    build = WITH_WIRES[name]

    def worker(transport: Transport) -> SparseStream:
        stream = random_stream(torch.Generator().manual_seed(transport.rank), 1000, 20)
        if transport.rank == 1:
            stream.values[7] = spoil
        return build(transport, 1000, 20, wire=TESTED_WIRES[wire]).reduce(stream).reduced

    for reduced in run_ranks(3, worker):
        assert not reduced.as_stream().isfinite()


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
