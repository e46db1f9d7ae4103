"""Sparse reductions, one file per algorithm."""

from hvd_sparse.collectives.automatic import AutomaticCollective
from hvd_sparse.collectives.base import Collective, Reduction
from hvd_sparse.collectives.clt_k import CyclicLeader
from hvd_sparse.collectives.dense import DenseAllreduce
from hvd_sparse.collectives.dsar_split_allgather import DsarSplitAllgather
from hvd_sparse.collectives.exdyna import ExDyna
from hvd_sparse.collectives.gtopk import GTopk
from hvd_sparse.collectives.index_union import IndexUnion
from hvd_sparse.collectives.oktopk import OkTopk
from hvd_sparse.collectives.ssar_recursive_double import SsarRecursiveDouble
from hvd_sparse.collectives.ssar_split_allgather import SsarSplitAllgather
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
