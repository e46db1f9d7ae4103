"""The engine: from gradients as they become ready to reduced gradients."""

from hvd_sparse.engine.account import Observer
from hvd_sparse.engine.bucketing import Assignment, Choice, Method, TensorSpec
from hvd_sparse.engine.clipping import WithDense, with_dense
from hvd_sparse.engine.engine import Engine
from hvd_sparse.engine.stats import BucketStats, Stats, StepStats

__all__ = [
    "Assignment",
    "BucketStats",
    "Choice",
    "Engine",
    "Method",
    "Observer",
    "Stats",
    "StepStats",
    "TensorSpec",
    "WithDense",
    "with_dense",
]
