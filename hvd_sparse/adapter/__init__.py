"""The adapter: an engine behind Horovod's `compression=` argument."""

from hvd_sparse.adapter.compressor import SparseCompressor

__all__ = ["SparseCompressor"]
