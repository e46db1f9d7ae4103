"""A world of two levels: its groups of ranks, and what connects those of a host."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_sparse.hosts.devices import OverDevices
from hvd_sparse.hosts.grid import Grid
from hvd_sparse.hosts.inside import SHARDS, InsideHost, OverTransport, scattered
from hvd_sparse.hosts.shared import SharedHost, share
from hvd_sparse.transports.group import GroupTransport
from hvd_sparse.transports.nccl import NcclTransport
from hvd_sparse.transports.point_to_point import PointToPointTransport

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
