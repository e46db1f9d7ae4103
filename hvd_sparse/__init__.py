"""Gradient sparsification for Horovod: `hvd.DistributedOptimizer(compression=…)`."""

from hvd_sparse.compression import Compression
from hvd_sparse.errors import (
    ConfigError,
    HvdSparseError,
    PeerLostError,
    PlanError,
    TransportError,
    TransportTimeout,
    UnsupportedError,
)
from hvd_sparse.recording import Recorder

__version__ = "0.1.0"

__all__ = [
    "Compression",
    "ConfigError",
    "HvdSparseError",
    "PeerLostError",
    "PlanError",
    "Recorder",
    "TransportError",
    "TransportTimeout",
    "UnsupportedError",
    "__version__",
]
