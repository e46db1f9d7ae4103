"""The operations in plain torch: what they mean, and what runs where there is no native library.

Works on any device. The arguments are as `hvd_sparse.ops` has checked them.
"""

from hvd_sparse.ops.reference.estimation import kth_magnitude, sample_accumulator
from hvd_sparse.ops.reference.hosts import post, posted, sum_vectors
from hvd_sparse.ops.reference.selection import (
    accumulate_group_topk,
    accumulate_select,
    accumulate_topk,
    hash_select,
    partition_select,
)
from hvd_sparse.ops.reference.streams import (
    decode,
    difference,
    merge_sum,
    scatter_add,
    take_at,
    threshold_stream,
    unapplied,
    zero_at,
)
from hvd_sparse.ops.reference.wire import (
    gap_decode,
    gap_encode,
    qsgd_dequantize,
    qsgd_quantize,
)

__all__ = [
    "accumulate_group_topk",
    "accumulate_select",
    "accumulate_topk",
    "decode",
    "difference",
    "gap_decode",
    "gap_encode",
    "hash_select",
    "kth_magnitude",
    "merge_sum",
    "partition_select",
    "post",
    "posted",
    "qsgd_dequantize",
    "qsgd_quantize",
    "sample_accumulator",
    "scatter_add",
    "sum_vectors",
    "take_at",
    "threshold_stream",
    "unapplied",
    "zero_at",
]
