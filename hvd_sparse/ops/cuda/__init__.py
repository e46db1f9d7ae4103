"""The operations on CUDA tensors: kernels of csrc/cuda, compiled by CuPy when they are first used.

The arguments are as `hvd_sparse.ops` has checked them. Work goes to torch's current stream, and
memory comes from torch's allocator. An operation that returns a stream or a number waits for its
size; the others wait for nothing. The engine calls operations on a background thread and on a
stream of the bucket's own, so that neither backward nor the training thread waits.

* A selection's tiles of 4096 elements claim room for what they find, and a second kernel brings the
  claims into order (csrc/cuda/compact.cuh). Room is guessed. What finds none stays where it was,
  and the same launch again takes it.
* Exact top-k takes what passes a sampled pivot, finds the k-th key among that by radix descent,
  and puts the rest back. The host looks once, at the end.
* Sums of streams are taken stream by stream, without atomics: the same bits on every rank.
* An index out of range is left out. The next operation that waits raises the ValueError.
* What an operation costs the host is kept (`_workspace.py`): tables of segments by their gradients'
  addresses, zeroed words cut from a block, one wait for all that the host has to know.

A `Launcher` starts the kernels, so that tests can run the same Python and the same sources on a
CPU: tests/cuda/shim has a fiber per CUDA thread, blocks in adversarial order, and sanitizers.
"""

from __future__ import annotations

from hvd_sparse.ops.cuda._launcher import (
    AddressTable,
    Argument,
    CompileError,
    CupyLauncher,
    Launcher,
)
from hvd_sparse.ops.cuda.launch_selection import CudaSelection
from hvd_sparse.ops.cuda.launch_streams import CudaStreams


class CudaOps(CudaSelection, CudaStreams):
    """All of them, one base class for each family; started by `CupyLauncher(device)`."""
