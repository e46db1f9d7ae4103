"""One function per kernel: a torch reference, C++ for CPU tensors, and CUDA.

Streams are pairs of `indices`, int32 `(nnz,)` strictly ascending, and `values`, float32 `(nnz,)`.
Magnitudes are compared as integers, `bits(x) & 0x7fffffff`: NaN > inf > finite, and zeros of either
sign are never selected. Arguments are checked here, once: an `Accumulation` when it is made, others
by the operation. The order of a stream's indices is a precondition.

CPU tensors go to the native library, CUDA tensors to the kernels where CuPy is installed, and all
others to the torch reference. Without the library or CuPy, or with `HVD_SPARSE_NATIVE=0` in the
environment, the reference does everything, with the same results. On CUDA an index out of range
is no exception: it stops the device, as in torch.

A family of operations is a module here (what they promise, and their checks), one of the same name
in `reference`, `native` and `cuda`, and its part of the interface in `_interface`.
"""

from hvd_sparse.ops._arguments import GAP_BLOCK
from hvd_sparse.ops._dispatch import backend
from hvd_sparse.ops.accumulation import Accumulation, Before, Momentum
from hvd_sparse.ops.estimation import kth_magnitude, sample_accumulator
from hvd_sparse.ops.pages import new_vector, zero_vector
from hvd_sparse.ops.selection import (
    accumulate_group_topk,
    accumulate_select,
    accumulate_topk,
    hash_select,
    partition_select,
)
from hvd_sparse.ops.shared_memory import post, posted, sum_vectors
from hvd_sparse.ops.streams import (
    decode,
    difference,
    merge_sum,
    scatter_add,
    take_at,
    threshold_stream,
    unapplied,
    zero_at,
)
from hvd_sparse.ops.wire import gap_decode, gap_encode, qsgd_dequantize, qsgd_quantize

__all__ = [
    "GAP_BLOCK",
    "Accumulation",
    "Before",
    "Momentum",
    "accumulate_group_topk",
    "accumulate_select",
    "accumulate_topk",
    "backend",
    "decode",
    "difference",
    "gap_decode",
    "gap_encode",
    "hash_select",
    "kth_magnitude",
    "merge_sum",
    "new_vector",
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
    "zero_vector",
]
