"""Sparse reductions, one file per algorithm."""

from hvd_sparse.collectives.automatic import AutomaticCollective
from hvd_sparse.collectives.collective import Collective, Reduction
from hvd_sparse.collectives.dense_allreduce import DenseAllreduce
from hvd_sparse.collectives.exdyna import ExDyna
from hvd_sparse.collectives.gtopk import GTopk
from hvd_sparse.collectives.index_union import CyclicLeader, IndexUnion
from hvd_sparse.collectives.oktopk import OkTopk
from hvd_sparse.collectives.sparcml import (
    DsarSplitAllgather,
    SsarRecursiveDouble,
    SsarSplitAllgather,
)
from hvd_sparse.collectives.topk_allgather import TopkAllgather

__all__ = [
    "AutomaticCollective",
    "Collective",
    "CyclicLeader",
    "DenseAllreduce",
    "DsarSplitAllgather",
    "ExDyna",
    "GTopk",
    "IndexUnion",
    "OkTopk",
    "Reduction",
    "SsarRecursiveDouble",
    "SsarSplitAllgather",
    "TopkAllgather",
]
