"""The adapter: an engine behind Horovod's `compression=` argument."""

from hvd_sparse.adapter.binding import calling_optimizer, named_pairs
from hvd_sparse.adapter.compressor import SparseCompressor

__all__ = ["SparseCompressor", "calling_optimizer", "named_pairs"]
