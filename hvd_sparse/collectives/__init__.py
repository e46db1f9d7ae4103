"""Sparse reductions, one file per algorithm."""

from hvd_sparse.collectives.automatic import automatic_collective
from hvd_sparse.collectives.base import Collective, Reduction
from hvd_sparse.collectives.oktopk import OkTopk
from hvd_sparse.collectives.topk_allgather import TopkAllgather

__all__ = ["Collective", "OkTopk", "Reduction", "TopkAllgather", "automatic_collective"]
