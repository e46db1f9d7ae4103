"""A world of two levels: H hosts with L ranks each, and what connects them.

A world has two levels only where the slots of all ranks together fill a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.errors import ConfigError
from hvd_sparse.hosts.inside import InsideHost, OverDevices
from hvd_sparse.hosts.shared import SharedHost, share
from hvd_sparse.streams import CPU
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.nccl import NcclTransport
from hvd_sparse.transports.point_to_point import PointToPointTransport

ACROSS, INSIDE = 1, 2


class Slot(NamedTuple):
    """Where Horovod's launcher has put a rank, in its words: `cross_rank` is the host's number."""

    local_rank: int
    local_size: int
    cross_rank: int


@dataclass(frozen=True)
class Grid:
    """`ranks[host][local rank]`, H rows of L ranks, and this rank's row and column."""

    ranks: tuple[tuple[int, ...], ...]
    host: int
    local_rank: int

    @property
    def hosts(self) -> int:
        return len(self.ranks)

    @property
    def local_size(self) -> int:
        return len(self.ranks[0])

    @property
    def inside(self) -> tuple[int, ...]:
        return self.ranks[self.host]

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks with this local rank, in the order of the hosts."""
        return tuple(row[self.local_rank] for row in self.ranks)

    def __str__(self) -> str:
        return f"{self.hosts} hosts x {self.local_size} workers"


def grid_of(slots: Sequence[Slot], rank: int) -> Grid:
    """The grid that the ranks fill, from their slots in order, as seen from `rank`.

    Raises:
        ConfigError: They fill no grid; the message says who is missing or too many.
    """
    sizes = {slot.local_size for slot in slots}
    if len(sizes) > 1:
        told = ", ".join(f"rank {r} {slot.local_size}" for r, slot in enumerate(slots))
        raise ConfigError(f"every host must have as many workers as each other, got {told}")
    rows: dict[int, dict[int, int]] = {}
    for r, slot in enumerate(slots):
        row = rows.setdefault(slot.cross_rank, {})
        if slot.local_rank in row:
            raise ConfigError(
                f"local rank {slot.local_rank} of host {slot.cross_rank} must be one rank, got "
                f"ranks {row[slot.local_rank]} and {r}"
            )
        row[slot.local_rank] = r
    (local_size,) = sizes
    for host, row in rows.items():
        if sorted(row) != list(range(local_size)):
            raise ConfigError(
                f"a process set must have whole hosts, got {len(row)} of the {local_size} workers "
                f"of host {host}"
            )
    ordered = [rows[host] for host in sorted(rows)]
    ranks = tuple(tuple(row[local] for local in range(local_size)) for row in ordered)
    return Grid(ranks, sorted(rows).index(slots[rank].cross_rank), slots[rank].local_rank)


class Hosts:
    """What an engine needs for two levels; `transport` connects all ranks.

    `across` connects the ranks with this local rank, one of each host, and `inside` those of this
    host.
    """

    def __init__(self, transport: PointToPointTransport, grid: Grid) -> None:
        self.grid = grid
        self.across = GroupTransport(transport, grid.across, ACROSS)
        self.inside = GroupTransport(transport, grid.inside, INSIDE)
        self._transport = transport

    def problem(self) -> str:
        """Why the ranks of this host cannot share memory, or ""; collective over the host."""
        return share(self.inside, 0)[1]

    @property
    def kind(self) -> str:
        """A name for this rank's shard, to which location-bound state belongs."""
        return f"shard {self.grid.local_rank} of {self.grid.local_size}"

    def exchange_of(self, numel: int, dtype: str, device: torch.device) -> InsideHost:
        """The exchange inside this host of a bucket of `numel` elements; collective over the host.

        `dtype` is the gradients' type, such as "torch.float32", and `device` where they are.
        """
        transport = self._transport
        if isinstance(transport, NcclTransport) and device == transport.device:
            return OverDevices(transport, self.inside, numel)
        return SharedHost(transport, self.inside, numel, dtype)

    def shard_of(self, whole: Tensor, exchange: InsideHost) -> Tensor:
        """The sum over the host's ranks of this rank's shard of a float32 vector, between steps."""
        sizes = [stop - start for start, stop in pairwise(exchange.bounds)]
        mine = ops.moved((whole,), CPU)[0].split(sizes)
        total = torch.zeros_like(mine[self.inside.rank])
        for message in self.inside.all_to_all([(shard,) for shard in mine], channel="host.shards"):
            total += message.view(total.dtype)
        return ops.moved((total,), whole.device)[0]
