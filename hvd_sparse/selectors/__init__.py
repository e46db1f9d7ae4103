"""Selectors: which entries leave the accumulator."""

from hvd_sparse.selectors.bisection import BisectionTopK
from hvd_sparse.selectors.exact import ExactTopK
from hvd_sparse.selectors.fitted import GaussianThreshold, SidcoThreshold
from hvd_sparse.selectors.grouped import GroupedTopK
from hvd_sparse.selectors.hard import HardThreshold
from hvd_sparse.selectors.hashed import HashedExtraction
from hvd_sparse.selectors.online import OnlineThreshold
from hvd_sparse.selectors.random_k import RandomK
from hvd_sparse.selectors.reused import ReusedThreshold
from hvd_sparse.selectors.sampled import SampledThreshold
from hvd_sparse.selectors.selector import Selector
from hvd_sparse.selectors.thresholded import Estimator, Extraction, ThresholdSelector

__all__ = [
    "BisectionTopK",
    "Estimator",
    "ExactTopK",
    "Extraction",
    "GaussianThreshold",
    "GroupedTopK",
    "HardThreshold",
    "HashedExtraction",
    "OnlineThreshold",
    "RandomK",
    "ReusedThreshold",
    "SampledThreshold",
    "Selector",
    "SidcoThreshold",
    "ThresholdSelector",
]
