"""Two levels: what the ranks of a host do among themselves, densely, before hosts exchange."""

from hvd_sparse.hosts.hosts import Grid, Hosts, Slot, grid_of
from hvd_sparse.hosts.inside import InsideHost, ShardedSum, shard_bounds

__all__ = [
    "Grid",
    "Hosts",
    "InsideHost",
    "ShardedSum",
    "Slot",
    "grid_of",
    "shard_bounds",
]
