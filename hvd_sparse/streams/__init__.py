"""Sparse vectors: what selectors give, what collectives exchange, and how it is combined."""

from hvd_sparse.streams.part import (
    INDEX_BYTES,
    MAX,
    MIN,
    OPERATIONS,
    SUM,
    DenseSum,
    Operation,
    Part,
    Sum,
    combine,
    join,
    sum_of_parts,
    uniform_regions,
)
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
