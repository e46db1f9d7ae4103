"""A world of two levels: its groups of ranks, and what connects those of a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_sparse.errors import ConfigError
from hvd_sparse.hosts.devices import OverDevices
from hvd_sparse.hosts.inside import SHARDS, InsideHost, OverTransport, scattered
from hvd_sparse.hosts.shared import SharedHost, share
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.nccl import NcclTransport
from hvd_sparse.transports.point_to_point import PointToPointTransport

# MERGED hosts.grid
# The shape of a world: H hosts with L ranks each, told from what the launcher says of each rank.
#
# Nothing is believed of one rank alone: a world has two levels only where the places of all ranks
# together fill a grid.


class Place(NamedTuple):
    """Where the launcher has put a rank.

    Attributes:
        local_rank: Its number among the ranks of its host.
        local_size: How many these are.
        cross_rank: The number of its host.
        cross_size: How many hosts there are.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Grid:
    """Which rank is where, as one of them sees it.

    Attributes:
        ranks: `ranks[host][local rank]`: H rows of L ranks.
        host: The row of this rank.
        local_rank: Its column.
    """

    ranks: tuple[tuple[int, ...], ...]
    host: int
    local_rank: int

    @property
    def hosts(self) -> int:
        """H."""
        return len(self.ranks)

    @property
    def local_size(self) -> int:
        """L."""
        return len(self.ranks[0])

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this host, in order."""
        return self.ranks[self.host]

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks with this local rank, in the order of the hosts."""
        return tuple(row[self.local_rank] for row in self.ranks)

    def __str__(self) -> str:
        """As messages say it."""
        return f"{self.hosts} hosts x {self.local_size} workers"

    @staticmethod
    def regular(hosts: int, local_size: int, rank: int) -> Grid:
        """A grid whose ranks count through one host after the other."""
        rows = tuple(
            tuple(range(host * local_size, (host + 1) * local_size)) for host in range(hosts)
        )
        return Grid(rows, *divmod(rank, local_size))


def grid_of(places: Sequence[Place], rank: int) -> Grid:
    """The grid that ranks fill.

    Args:
        places: Of the ranks in their order.
        rank: This rank.

    Raises:
        ConfigError: They fill none; the message says who is missing or too many.
    """
    sizes = {place.local_size for place in places}
    if len(sizes) > 1:
        told = ", ".join(f"rank {r} {place.local_size}" for r, place in enumerate(places))
        raise ConfigError(f"every host must have as many workers as each other, got {told}")
    rows: dict[int, dict[int, int]] = {}
    for r, place in enumerate(places):
        row = rows.setdefault(place.cross_rank, {})
        if place.local_rank in row:
            raise ConfigError(
                f"local rank {place.local_rank} of host {place.cross_rank} must be one rank, got "
                f"ranks {row[place.local_rank]} and {r}"
            )
        row[place.local_rank] = r
    (local_size,) = sizes
    for host, row in rows.items():
        if sorted(row) != list(range(local_size)):
            raise ConfigError(
                f"a process set must have whole hosts, got {len(row)} of the {local_size} workers "
                f"of host {host}"
            )
    ordered = [rows[host] for host in sorted(rows)]
    ranks = tuple(tuple(row[local] for local in range(local_size)) for row in ordered)
    return Grid(ranks, sorted(rows).index(places[rank].cross_rank), places[rank].local_rank)


ACROSS, INSIDE = 1, 2


class Hosts:
    """What an engine needs to know of two levels.

    Args:
        transport: Connects all ranks.
        grid: Where they are.
        shares_memory: Whether the ranks of a host exchange through memory that they share; else
            they send each other messages.

    Attributes:
        grid: Where the ranks are.
        across: Connects the ranks with this local rank, one of each host.
        inside: Connects the ranks of this host.
    """

    def __init__(
        self, transport: PointToPointTransport, grid: Grid, *, shares_memory: bool = True
    ) -> None:
        self.grid = grid
        self.across = GroupTransport(transport, grid.across, ACROSS)
        self.inside = GroupTransport(transport, grid.inside, INSIDE)
        self._transport = transport
        self._shares_memory = shares_memory

    def problem(self) -> str:
        """Why the ranks of this host cannot share memory, or nothing; all of them ask together."""
        return share(self.inside, 0)[1] if self._shares_memory else ""

    @property
    def kind(self) -> str:
        """What state that is bound to a place is bound to."""
        return f"shard {self.grid.local_rank} of {self.grid.local_size}"

    def exchange_of(self, numel: int, dtype: str, device: torch.device) -> InsideHost:
        """A bucket's exchange inside this host; all of its ranks call this together.

        Args:
            numel: n.
            dtype: The gradients' type, as `torch.float32` is spelled.
            device: Where they are.

        Raises:
            TransportError: A peer is gone, or memory cannot be shared.
        """
        transport = self._transport
        if isinstance(transport, NcclTransport) and device.type == transport.device.type:
            return OverDevices(transport, self.inside, numel)
        if self._shares_memory:
            return SharedHost(self._transport, self.inside, numel, dtype)
        return OverTransport(self.inside, numel)

    def shard_of(self, whole: Tensor, exchange: InsideHost) -> Tensor:
        """The sum over the host's ranks of this rank's shard of vectors, between steps.

        Args:
            whole: float32 `(n,)`.
            exchange: Of the bucket.
        """
        return scattered(self.inside, whole, exchange.bounds, SHARDS)
