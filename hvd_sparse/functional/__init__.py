"""Sparse collectives for vectors of any origin, without a compressor."""

from hvd_sparse.functional.api import (
    sparse_allgather,
    sparse_allgather_async,
    sparse_allreduce,
    sparse_allreduce_async,
)

__all__ = [
    "sparse_allgather",
    "sparse_allgather_async",
    "sparse_allreduce",
    "sparse_allreduce_async",
]
