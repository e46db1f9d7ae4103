"""For torch's `DistributedDataParallel`, without Horovod: `register(model, compression)`."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.adapter import SparseCompressor
from hvd_sparse.errors import ConfigError


def register(
    model: DistributedDataParallel, compression: SparseCompressor | Callable[[], SparseCompressor]
) -> SparseCompressor:
    """Let a compression reduce a model's gradients, as DDP's communication hook.

        model = DistributedDataParallel(model)
        compression = hvd_sparse.ddp.register(model, hvd_sparse.Compression.topk(density=0.01))

    All ranks call this before the first backward pass. Dense tensors are averaged by the model's
    process group. The compression takes names from the model where it has none.

    Args:
        model: On each rank.
        compression: Made by a constructor of `Compression`, `from_policy`, `dgc_sgd` or
            `sparse_adamw`, with the same options on all ranks; or an uncalled constructor.

    Returns:
        The compression, for `stats()`, checkpoints and the like.

    Raises:
        ConfigError: The model is no `DistributedDataParallel`, or has a communication hook; or the
            compression is none of this package's, or serves another model.
    """
    model = getattr(model, "_orig_mod", model)  # which torch.compile() has wrapped
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"model must be a DistributedDataParallel, got a {type(model).__name__}")
    if hasattr(compression, "compress") and not isinstance(compression, SparseCompressor):
        compression = compression()  # an uncalled constructor
    if not isinstance(compression, SparseCompressor):
        raise ConfigError(
            "compression must be one of hvd_sparse, as hvd_sparse.Compression.topk(), got a "
            f"{type(compression).__name__}"
        )
    compression.register(model)
    return compression
