"""The adapter: an engine behind Horovod's `compression=` argument."""

from hvd_sparse.adapter.binding import caller_of, named_pairs
from hvd_sparse.adapter.compressor import SparseCompressor

__all__ = ["SparseCompressor", "caller_of", "named_pairs"]
