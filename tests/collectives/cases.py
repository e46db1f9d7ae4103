"""Streams that are hard on a collective, and what came of them on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_sparse.collectives import Collective, Reduction
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport, run_ranks
from tests.streams import dense

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31)


@dataclass(frozen=True)
class Case:
    """One exchange: what rank r of P brings."""

    name: str
    numel: int
    stream: Callable[[torch.Generator, int, int], SparseStream]


def stream_of(numel: int, indices: Tensor, values: Tensor) -> SparseStream:
    return SparseStream(indices.to(torch.int32), values.float(), numel)


def random_stream(
    generator: torch.Generator, numel: int, nnz: int, start: int = 0, stop: int | None = None
) -> SparseStream:
    """Distinct places in `[start, stop)`, small whole values, none of them 0."""
    span = (numel if stop is None else stop) - start
    places = torch.randperm(span, generator=generator)[:nnz].sort().values + start
    values = torch.randint(1, 100, (places.numel(),), generator=generator)
    signs = torch.randint(0, 2, (places.numel(),), generator=generator) * 2 - 1
    return stream_of(numel, places, values * signs)


def _every(numel: int, step: int, first: int, value: float) -> SparseStream:
    places = torch.arange(first, numel, step)
    return stream_of(numel, places, torch.full((places.numel(),), value))


CASES = [
    Case("no elements", 0, lambda g, r, P: SparseStream.empty(0)),
    Case("one element", 1, lambda g, r, P: random_stream(g, 1, 1)),
    Case("five elements", 5, lambda g, r, P: random_stream(g, 5, 2)),
    Case("nothing", 400, lambda g, r, P: SparseStream.empty(400)),
    Case("sparse", 1000, lambda g, r, P: random_stream(g, 1000, 10)),
    Case("fills up", 300, lambda g, r, P: random_stream(g, 300, 40)),
    Case("dense", 100, lambda g, r, P: random_stream(g, 100, 100)),
    Case("one region", 1000, lambda g, r, P: random_stream(g, 1000, 10, 500, 515)),
    Case(
        "one rank alone",
        500,
        lambda g, r, P: random_stream(g, 500, 20) if r == P - 1 else SparseStream.empty(500),
    ),
    Case(
        "fewer entries than ranks",
        500,
        lambda g, r, P: random_stream(g, 500, 1) if r % 3 == 0 else SparseStream.empty(500),
    ),
    Case("no overlap", 640, lambda g, r, P: _every(640, 3 * P, r, r + 1.0)),
    Case("all overlap", 400, lambda g, r, P: _every(400, 20, 3, r - 2.5)),
    Case("ties", 200, lambda g, r, P: _every(200, 11, r % 11, 3.0)),
    Case("cancels out", 200, lambda g, r, P: _every(200, 10, 0, float((-1) ** r))),
    Case("negative zeros", 200, lambda g, r, P: _every(200, 10, r % 10, -0.0)),
    Case("denormal", 200, lambda g, r, P: _every(200, 10, r % 10, 1e-42)),
]


def cases_for(world_size: int) -> list[Case]:
    """All of them, but for the largest worlds, whose many messages take their time."""
    if world_size <= 16:
        return CASES
    names = ("fills up", "one region", "fewer entries than ranks")
    return [case for case in CASES if case.name in names[: 1 + 64 // world_size]]


def case_stream(case: Case, rank: int, world_size: int) -> SparseStream:
    seed = len(case.name) * 1000 + rank
    return case.stream(torch.Generator().manual_seed(seed), rank, world_size)


def reduce_cases(
    world_size: int, collective: Callable[[Transport, Case], Collective], steps: int = 1
) -> list[tuple[Case, list[Reduction]]]:
    """Every case on all ranks of one world, `steps` times: the last step's outcome."""

    def worker(transport: Transport) -> list[Reduction]:
        outcomes = []
        for case in cases_for(world_size):
            reducer = collective(transport, case)
            for _ in range(steps):
                stream = case_stream(case, transport.rank, world_size)
                reduction = reducer.reduce(stream)
            outcomes.append(reduction)
        return outcomes

    ranks = run_ranks(world_size, worker, timeout_s=60.0)
    return [(case, [rank[i] for rank in ranks]) for i, case in enumerate(cases_for(world_size))]


def assert_identical(reductions: list[Reduction], what: str) -> SparseStream:
    """All ranks have the same bits, in ascending order; returns what they have."""
    first = reductions[0].reduced
    for reduction in reductions[1:]:
        other = reduction.reduced
        assert torch.equal(first.indices, other.indices), what
        assert torch.equal(first.values.view(torch.int32), other.values.view(torch.int32)), what
    assert bool((first.indices[1:] > first.indices[:-1]).all()), what
    return first


def assert_mass_conserved(case: Case, reductions: list[Reduction], rtol: float = 0.0) -> None:
    """What went in is what was applied and what came back."""
    world_size = len(reductions)
    streams = [case_stream(case, rank, world_size) for rank in range(world_size)]
    given = sum(dense(stream) for stream in streams)
    after = dense(reductions[0].reduced) + sum(dense(r.returned) for r in reductions)
    largest = max((float(s.values.abs().max()) for s in streams if s.nnz), default=0.0)
    torch.testing.assert_close(after, given, rtol=0, atol=rtol * largest, msg=case.name)
