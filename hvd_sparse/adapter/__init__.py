"""The doors: an engine behind Horovod's `compression=`, or behind DDP's communication hook."""

from hvd_sparse.adapter.binding import caller_of, named_pairs
from hvd_sparse.adapter.compressor import SparseCompressor
