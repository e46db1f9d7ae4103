"""Streams as trainings have them: ranks whose entries lie in other places, and move.

A pattern says where a rank's entries lie in a step, as patches of the vector. Tests, simulations
(`benchmarks.many_ranks`) and `benchmarks.allreduce` draw from the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from typing_extensions import override

from hvd_sparse.lab.simulator.synthetic_streams import SyntheticStreams, generator
from hvd_sparse.streams import SparseStream

JUMP_STEP = 3
"""The step in which what jumps does so."""


class Patch(NamedTuple):
    """Some of a rank's entries.

    Attributes:
        start: Where they begin, as a share of the vector.
        stop: Where they end.
        share: How many there are, as a share of k.
        scale: What their values are multiplied by.
        is_common: Whether all ranks draw the same indices.
    """

    start: float
    stop: float
    share: float = 1.0
    scale: float = 1.0
    is_common: bool = False


def _region(number: int, P: int, share: float = 1.0, scale: float = 1.0) -> Patch:
    return Patch(number % P / P, (number % P + 1) / P, share, scale)


PATTERNS: Mapping[str, Callable[[int, int, int], Sequence[Patch]]] = MappingProxyType(
    {
        "uniform": lambda rank, step, P: [Patch(0, 1)],
        "identical": lambda rank, step, P: [Patch(0, 1, is_common=True)],
        "layers": lambda rank, step, P: [
            Patch(0, 0.1, 0.5),
            Patch(0.1, 0.4, 0.4),
            Patch(0.4, 1, 0.1),
        ],
        "own expert": lambda rank, step, P: [_region(rank, P, 0.5), Patch(0, 1, 0.5)],
        "own region": lambda rank, step, P: [_region(rank, P)],
        "next region": lambda rank, step, P: [_region(rank + 1, P)],
        "next region, a loud rank": lambda rank, step, P: [
            _region(rank + 1, P, 1.0, 1000.0 if rank == 0 else 1.0)
        ],
        "wandering region": lambda rank, step, P: [_region(rank + step, P)],
        "hot rows, a quiet rank": lambda rank, step, P: [
            Patch(0.3, 0.32) if rank else Patch(0.9, 1, 0.01)
        ],
        "hot row": lambda rank, step, P: [Patch(0.25, 0.2625, 0.8), Patch(0, 1, 0.2)],
        "every second rank has none": lambda rank, step, P: [Patch(0, 1)] if rank % 2 else [],
        "few nonzeros": lambda rank, step, P: [Patch(0, 1, 0.5 / P)],
        "loud region": lambda rank, step, P: [
            _region(0, P, 1 / P, 100.0 if step >= JUMP_STEP else 1.0),
            Patch(1 / P, 1, 1 - 1 / P),
        ],
        "jump": lambda rank, step, P: [Patch(0.1, 0.12) if step < JUMP_STEP else Patch(0.7, 0.72)],
        "jump of one rank": lambda rank, step, P: [
            Patch(0.9, 0.92) if step >= JUMP_STEP and rank == 0 else Patch(0, 1)
        ],
        "jump to a region, a loud rank": lambda rank, step, P: (
            [Patch(0, 1)]
            if step < JUMP_STEP
            else [_region(P // 2, P, 1.0, 1000.0 if rank == P - 1 else 1.0)]
        ),
        "jump to the next region, louder": lambda rank, step, P: (
            [_region(rank, P)]
            if step < JUMP_STEP
            else [_region(rank + 1, P, 1.0, 1000.0 if rank == 0 else 10.0)]
        ),
        "to and fro": lambda rank, step, P: [Patch(0, 1) if step % 2 else Patch(0.5, 0.52)],
        "frozen stretch": lambda rank, step, P: [
            Patch(0, 0.5) if step % 6 < 3 else Patch(0, 1),
        ],
    }
)
"""By name: the patches of a rank in a step, of P ranks. Patches of a rank that overlap may draw the
same index, so that there are a few entries less."""


@dataclass(frozen=True)
class PatternStreams(SyntheticStreams):
    """Streams of a pattern: a name in `PATTERNS`."""

    pattern: str = "uniform"

    @override
    def stream(self, rank: int, step: int, numel: int, k: int, ranks: int = 1) -> SparseStream:
        """The entries, at most k, that a rank has in a step, of a vector of `numel` elements."""
        own, common = generator(self.seed, step, 1 + rank), generator(self.seed, step, 0)
        indices, scales = [], []
        for patch in PATTERNS[self.pattern](rank, step, ranks):
            start, stop = int(patch.start * numel), max(1, int(patch.stop * numel))
            draw = common if patch.is_common else own
            places = torch.randperm(stop - start, generator=draw, device="cpu") + start
            indices.append(places[: round(patch.share * k)])
            scales.append(torch.full_like(indices[-1], patch.scale, dtype=torch.float32))
        if not indices:
            return SparseStream.empty(numel)
        every, places = torch.cat(indices).unique(return_inverse=True)
        values = torch.randn(every.numel(), generator=own, dtype=torch.float32, device="cpu")
        loudness = torch.ones_like(values).index_copy_(0, places, torch.cat(scales))
        return SparseStream(every.int(), values * values.abs() * loudness, numel)
