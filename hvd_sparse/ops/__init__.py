"""One function per kernel: a torch reference, C++ for CPU tensors, and CUDA.

Every operation takes and gives:

* an `Accumulation(residual, gradients, momentum, before)`: gradients, laid side by side over a
  float32 residual `(n,)`, that the operation adds in its one pass over memory;
* streams: `indices`, int32 `(nnz,)` strictly ascending, and `values`, float32 `(nnz,)`;
* magnitudes, compared as the integers `bits(x) & 0x7fffffff`: NaN > inf > finite. A threshold `t`
  selects `key(x) >= max(1, key(t))`, so never an exact zero of either sign, and always what is
  not finite.

| family | operations |
|---|---|
| selection | `accumulate_select`, `accumulate_topk`, `accumulate_group_topk`, `hash_select`, \
`sample_accumulator` |
| streams | `merge_sum`, `difference`, `threshold_stream`, `scatter_add`, `decode`, `take_at`; \
of `on(device)` only |
| hosts | `sum_vectors`, `post`, `posted`; of `on_host()` only |
| wire | `gap_encode`, `gap_decode`, `qsgd_quantize`, `qsgd_dequantize`; of `on_host()` only |

A family is a section of `reference.py` and of `native.py`, `csrc/cpu/api_<family>.cpp` and, where
it has kernels, `cuda/launch_<family>.py`. `selection.py` documents its operations and checks their
arguments; `reference.py` documents the others. `wire/` alone calls those of wires.

All implementations give the same bits. CPU tensors go to the native library, CUDA tensors to the
kernels where CuPy is installed, all others to the torch reference. Without the library or CuPy, or
with `HVD_SPARSE_NATIVE=0` in the environment, the reference does everything. `backend()` tells.

Arguments are checked once: an `Accumulation` when it is made, a stream when it is made or read from
a message, other tensors by the function that gets them (type, shape, device, contiguity). The order
of a stream's indices is a precondition. An index out of range raises ValueError. On CUDA the kernel
leaves the entry out, and the next operation that waits for the device raises.
"""

from hvd_sparse.ops._arguments import CPU, GAP_BLOCK
from hvd_sparse.ops._dispatch import Ops, backend, on, on_host
from hvd_sparse.ops.accumulation import Accumulation, Before, Momentum
from hvd_sparse.ops.pages import moved, new_vector, queued, zero_vector
from hvd_sparse.ops.selection import (
    accumulate_group_topk,
    accumulate_select,
    accumulate_topk,
    hash_select,
    sample_accumulator,
)
