"""Selectors: which entries leave the accumulator."""

from hvd_sparse.selectors.base import Selector
from hvd_sparse.selectors.exact import ExactTopK
from hvd_sparse.selectors.reused import ReusedThreshold

__all__ = ["ExactTopK", "ReusedThreshold", "Selector"]
