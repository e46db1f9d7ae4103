"""Sparse vectors: what selectors give, what collectives exchange, and how it is combined.

A `SparseStream` has `indices` int32 `(nnz,)` strictly ascending, `values` float32 `(nnz,)`, and
`numel`, below 2**31. Every selector and collective takes and gives streams in this form.

A `Part` is a stretch `[start, stop)` of a vector, sparse or dense, of any type and with blocks of
values (an embedding's rows). `combine` merges parts in the order of the list, by any `Operation`
with a neutral element, and tests at each merge whether the dense form takes less room; `join` puts
adjacent parts side by side.

A sum that fills up stays as it came: a `DenseSum` of adjacent parts, which `write` scales and casts
into the gradient, once. It has the `indices` and `values` of a stream for whoever needs them.
"""

from hvd_sparse.ops import CPU
from hvd_sparse.streams.part import (
    INDEX_BYTES,
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
from hvd_sparse.streams.stream import ENTRY_BYTES, SparseStream, merge, sum_of, unapplied
