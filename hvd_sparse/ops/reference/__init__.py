"""The operations in plain torch: what they mean, and what runs where there is no native library.

Works on any device. The arguments are as `hvd_sparse.ops` has checked them.
"""

from hvd_sparse.ops.reference.estimation import kth_magnitude
from hvd_sparse.ops.reference.selection import accumulate_select, accumulate_topk
from hvd_sparse.ops.reference.streams import (
    decode,
    difference,
    merge_sum,
    scatter_add,
    threshold_stream,
)

__all__ = [
    "accumulate_select",
    "accumulate_topk",
    "decode",
    "difference",
    "kth_magnitude",
    "merge_sum",
    "scatter_add",
    "threshold_stream",
]
