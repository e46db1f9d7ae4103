"""Hosts and workers, numbered host by host."""

from __future__ import annotations

from hvd_sparse.hosts import Grid, Slot, grid_of


def slots(*hosts: int) -> list[Slot]:
    """Of ranks that count through hosts of so many workers."""
    return [Slot(local, size, host) for host, size in enumerate(hosts) for local in range(size)]


def regular_grid(hosts: int, local_size: int, rank: int) -> Grid:
    """Equal hosts, as one of their workers sees them."""
    return grid_of(slots(*[local_size] * hosts), rank)
