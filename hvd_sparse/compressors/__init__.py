"""The constructors of compressions, by name.

Each takes its own arguments and the shared ones, which `inspect.signature` shows, and returns a
`SparseCompressor`, whose `method` an engine or a plan can use without Horovod.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.compressors.dgc import dgc, dgc_sgd, dragonn
from hvd_sparse.compressors.exclusive import clt_k, exdyna
from hvd_sparse.compressors.fitted import gaussiank, mstopk, sidco
from hvd_sparse.compressors.oktopk import oktopk
from hvd_sparse.compressors.topk import hard_threshold, randomk, topk

COMPRESSORS: Mapping[str, Callable[..., SparseCompressor]] = MappingProxyType(
    {
        "topk": topk,
        "oktopk": oktopk,
        "dgc": dgc,
        "dragonn": dragonn,
        "exdyna": exdyna,
        "clt_k": clt_k,
        "gaussiank": gaussiank,
        "sidco": sidco,
        "mstopk": mstopk,
        "hard_threshold": hard_threshold,
        "randomk": randomk,
    }
)

__all__ = [
    "COMPRESSORS",
    "clt_k",
    "dgc",
    "dgc_sgd",
    "dragonn",
    "exdyna",
    "gaussiank",
    "hard_threshold",
    "mstopk",
    "oktopk",
    "randomk",
    "sidco",
    "topk",
]
