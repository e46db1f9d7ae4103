"""Sparse vectors: what selectors give, what collectives exchange, and how it is combined."""

from hvd_sparse.streams.dense_sum import DenseSum, Sum, sum_of_parts
from hvd_sparse.streams.operation import MAX, MIN, OPERATIONS, SUM, Operation
from hvd_sparse.streams.part import INDEX_BYTES, Part, combine, join, uniform_regions
from hvd_sparse.streams.stream import ENTRY_BYTES, SparseStream, sum_of, unapplied

__all__ = [
    "ENTRY_BYTES",
    "INDEX_BYTES",
    "MAX",
    "MIN",
    "OPERATIONS",
    "SUM",
    "DenseSum",
    "Operation",
    "Part",
    "SparseStream",
    "Sum",
    "combine",
    "join",
    "sum_of",
    "sum_of_parts",
    "unapplied",
    "uniform_regions",
]
