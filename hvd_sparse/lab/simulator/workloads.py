"""Streams to simulate with: synthetic ones, made in O(k), or recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.checks import check_at_least, check_count
from hvd_sparse.errors import ConfigError
from hvd_sparse.streams import SparseStream


class StreamSource(Protocol):
    """Gives every rank its stream of every step."""

    def stream(self, rank: int, step: int, numel: int, k: int) -> SparseStream:
        """The k entries of a vector of `numel` elements that a rank has in a step."""


@dataclass(frozen=True)
class SyntheticStreams:
    """Random indices, of which the ranks share some; heavy-tailed values.

    Attributes:
        overlap: Share of a stream's indices that all ranks have, in [0, 1]; the others are drawn
            by each rank for itself.
        skew: How crowded the indices are, at least 0: an index is n u^(1 + skew) for a u that is
            uniform in [0, 1). 0 spreads them evenly; with 9, half of them are in the first 0.1 %.
        region: Share of the vector, from its start, that holds all indices, in (0, 1].
        loud: Share of a stream's entries, the first ones, whose values are a thousand times as
            large, in [0, 1]. With 1/P, all of a sum's largest values are with the owner of the
            first of P regions.
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
        check_at_least("skew", self.skew, 0.0)
        check_count("seed", self.seed, 0)

    def stream(self, rank: int, step: int, numel: int, k: int) -> SparseStream:
        """See `StreamSource`; k of them, but for a region that has less room."""
        shared = _generator(self.seed, step, 0)
        own = _generator(self.seed, step, 1 + rank)
        room = min(numel, max(k, round(self.region * numel)))
        common = self._draw(shared, room, round(self.overlap * k), torch.empty(0).long())
        indices = self._draw(own, room, k, common)
        values = torch.randn(indices.numel(), generator=own)
        values *= values.abs()
        values[: round(self.loud * indices.numel())] *= 1000
        return SparseStream(indices.int(), values, numel)

    def _draw(self, generator: torch.Generator, room: int, count: int, taken: Tensor) -> Tensor:
        """`taken`, filled up with other indices to `count`; int64, ascending."""
        indices = taken
        if 4 * count > room:  # crowded: rank all of them instead of trying
            weight = torch.rand(room, generator=generator, dtype=torch.float64)
            if self.skew:
                weight *= torch.linspace(1, 1e-9, room, dtype=torch.float64).pow(self.skew)
            weight[taken] = 2.0
            return weight.topk(count).indices.sort().values
        while (missing := count - indices.numel()) > 0:
            u = torch.rand(missing, generator=generator, dtype=torch.float64)
            drawn = (room * u.pow(1 + self.skew)).long()
            indices = torch.cat([indices, drawn]).unique()
        return indices


def _generator(*key: int) -> torch.Generator:
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed >> 1)


@dataclass(frozen=True)
class RecordedStreams:
    """Streams of a training run, as `record` has written them.

    Attributes:
        steps: For each step the ranks' streams, all of one numel.
    """

    steps: Sequence[Sequence[SparseStream]]

    @property
    def numel(self) -> int:
        """Length of the vectors."""
        return self.steps[0][0].numel

    @property
    def k(self) -> int:
        """Entries of a stream, on average."""
        every = [stream.nnz for ranks in self.steps for stream in ranks]
        return round(sum(every) / len(every))

    def stream(self, rank: int, step: int, numel: int, k: int) -> SparseStream:
        """See `StreamSource`; after the last step comes the first again.

        Raises:
            ConfigError: There are fewer ranks, or the vectors have another length.
        """
        ranks = self.steps[step % len(self.steps)]
        if rank >= len(ranks):
            raise ConfigError(f"{len(ranks)} ranks were recorded, rank {rank} was asked for")
        if numel != self.numel:
            raise ConfigError(f"numel must be {self.numel}, as recorded, got {numel}")
        return ranks[rank]

    @staticmethod
    def load(path: Path | str) -> RecordedStreams:
        """Read a recording.

        Raises:
            ConfigError: The file is none.
            OSError: It cannot be read.
        """
        try:
            with np.load(path) as file:
                shape = [int(number) for number in file["shape"]]
                if min(shape[:2]) < 1:
                    raise ValueError(f"it has {shape[0]} steps of {shape[1]} ranks")
                steps = [
                    [
                        SparseStream(
                            torch.from_numpy(file[f"indices_{step}_{rank}"]),
                            torch.from_numpy(file[f"values_{step}_{rank}"]),
                            shape[2],
                        )
                        for rank in range(shape[1])
                    ]
                    for step in range(shape[0])
                ]
        except (LookupError, ValueError, TypeError, AttributeError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path} is no recording of streams: {error}") from error
        return RecordedStreams(steps)


def record(path: Path | str, steps: Sequence[Sequence[SparseStream]]) -> None:
    """Write the ranks' streams of some steps to an `.npz` file for `RecordedStreams`.

    Args:
        path: The file.
        steps: For each step one stream per rank; at least one of each.
    """
    shape = (len(steps), len(steps[0]), steps[0][0].numel)
    arrays = {
        f"{name}_{step}_{rank}": array.numpy()
        for step, ranks in enumerate(steps)
        for rank, stream in enumerate(ranks)
        for name, array in (("indices", stream.indices), ("values", stream.values))
    }
    arrays["shape"] = np.array(shape)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # its flag is a keyword, too
