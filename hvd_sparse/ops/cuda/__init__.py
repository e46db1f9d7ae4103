"""The operations on CUDA tensors: kernels of csrc/cuda, compiled by CuPy when they are first used.

The arguments are as `hvd_sparse.ops` has checked them. Work goes to torch's current stream and
memory comes from torch's allocator. An operation that returns streams or numbers waits for their
size; the others wait for nothing.
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
from hvd_sparse.ops.cuda.launch_wire import CudaWire

__all__ = ["AddressTable", "Argument", "CompileError", "CudaOps", "CupyLauncher", "Launcher"]


class CudaOps(CudaSelection, CudaStreams, CudaWire):
    """All of them, one base class for each family.

    Args:
        launcher: Starts the kernels: `CupyLauncher(device)`.
    """
