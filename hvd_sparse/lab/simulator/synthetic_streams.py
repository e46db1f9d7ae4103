"""Random streams to simulate with, made in O(k)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.checks import check_count, check_not_negative
from hvd_sparse.errors import ConfigError
from hvd_sparse.streams import SparseStream


@dataclass(frozen=True)
class SyntheticStreams:
    """Streams with random indices, some of them common to all ranks, and heavy-tailed values.

    Attributes:
        overlap: Share of a stream's indices that all ranks have in common, in [0, 1]. Each rank
            draws the others for itself.
        skew: How crowded the indices are, at least 0: an index is n u^(1 + skew) for a u that is
            uniform in [0, 1). 0 spreads them evenly; with 9, half of them are in the first 0.1 %.
        region: Share of the vector, from its start, that holds all indices, in (0, 1].
        loud: Share of a stream's entries, the first ones, whose values are a thousand times
            larger, in [0, 1]. With 1/P, the owner of the first of P regions has all of the sum's
            largest values.
        seed: Another seed gives other streams of the same kind.
    """

    overlap: float = 0.0
    skew: float = 0.0
    region: float = 1.0
    loud: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap must be in [0, 1], got {self.overlap!r}")
        if not 0 < self.region <= 1:
            raise ConfigError(f"region must be in (0, 1], got {self.region!r}")
        if not 0 <= self.loud <= 1:
            raise ConfigError(f"loud must be in [0, 1], got {self.loud!r}")
        check_not_negative("skew", self.skew)
        check_count("seed", self.seed, 0)

    def stream(self, rank: int, step: int, numel: int, k: int, ranks: int = 1) -> SparseStream:
        """The k entries that one of some ranks has in a step, of a vector of `numel` elements.

        A region that is smaller than k is widened to k.
        """
        shared = generator(self.seed, step, 0)
        own = generator(self.seed, step, 1 + rank)
        room = min(numel, max(k, round(self.region * numel)))
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        common = self._draw(shared, room, round(self.overlap * k), nothing)
        indices = self._draw(own, room, k, common)
        values = torch.randn(indices.numel(), generator=own, dtype=torch.float32, device="cpu")
        values *= values.abs()
        values[: round(self.loud * indices.numel())] *= 1000
        return SparseStream(indices.int(), values, numel)

    def _draw(self, generator: torch.Generator, room: int, count: int, taken: Tensor) -> Tensor:
        """`taken`, filled up with other indices to `count`; int64, ascending."""
        indices = taken
        # Crowded, so that few draws are new: rank all of them instead of trying.
        if count > room * min(0.25, 0.9 ** (1 + self.skew)):
            weight = torch.rand(room, generator=generator, dtype=torch.float64, device="cpu").log()
            falling = torch.linspace(1, 1e-9, room, dtype=torch.float64, device="cpu")
            weight += self.skew * falling.log()
            weight[taken] = 1.0
            return weight.topk(count).indices.sort().values
        while (missing := count - indices.numel()) > 0:
            u = torch.rand(missing, generator=generator, dtype=torch.float64, device="cpu")
            drawn = (room * u.pow(1 + self.skew)).long()
            indices = torch.cat([indices, drawn]).unique()
        return indices


def generator(*key: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed >> 1)
