"""Two levels: what the ranks of a host do among themselves, densely, before hosts exchange."""

from hvd_sparse.hosts.hosts import Grid, Hosts, Place, grid_of
from hvd_sparse.hosts.inside import InsideHost, ShardedSum, shard_bounds

__all__ = [
    "Grid",
    "Hosts",
    "InsideHost",
    "Place",
    "ShardedSum",
    "grid_of",
    "shard_bounds",
]
