"""Gradient sparsification for Horovod's `compression=`, and for DDP as its communication hook."""

from hvd_sparse import ddp
from hvd_sparse._version import __version__
from hvd_sparse.compression import Compression, dgc_sgd, sparse_adamw
from hvd_sparse.errors import (
    CheckpointError,
    ConfigError,
    HvdSparseError,
    PeerLostError,
    PlanError,
    TransportError,
    TransportTimeout,
    UnsupportedError,
)
from hvd_sparse.functional import (
    sparse_allgather,
    sparse_allgather_async,
    sparse_allreduce,
    sparse_allreduce_async,
)
from hvd_sparse.optim import MomentumCorrectedSGD, SparseAdamW
from hvd_sparse.recording import Recorder
from hvd_sparse.streams import SparseStream

__all__ = [
    "CheckpointError",
    "Compression",
    "ConfigError",
    "HvdSparseError",
    "MomentumCorrectedSGD",
    "PeerLostError",
    "PlanError",
    "Recorder",
    "SparseAdamW",
    "SparseStream",
    "TransportError",
    "TransportTimeout",
    "UnsupportedError",
    "__version__",
    "ddp",
    "dgc_sgd",
    "sparse_adamw",
    "sparse_allgather",
    "sparse_allgather_async",
    "sparse_allreduce",
    "sparse_allreduce_async",
]
