"""The operations on CPU tensors through the C++ library, `hvd_sparse/_native.so`.

The arguments are as `hvd_sparse.ops` has checked them. Calls release the GIL, and may come from
several threads at once.
"""

from __future__ import annotations

from hvd_sparse.ops.native._library import ISA_NAMES, LIBRARY_PATH
from hvd_sparse.ops.native.estimation import NativeEstimation
from hvd_sparse.ops.native.hosts import NativeHosts
from hvd_sparse.ops.native.selection import NativeSelection
from hvd_sparse.ops.native.streams import NativeStreams
from hvd_sparse.ops.native.wire import NativeWire

__all__ = ["ISA_NAMES", "LIBRARY_PATH", "NativeOps"]


class NativeOps(NativeSelection, NativeEstimation, NativeStreams, NativeWire, NativeHosts):
    """The library's functions, one base class for each family of them."""
