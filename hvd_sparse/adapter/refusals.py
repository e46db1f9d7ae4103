"""What an optimizer or a setting of Horovod's may not be: refused by name, or warned of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from hvd_sparse.errors import ConfigError, UnsupportedError
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.optim import MomentumCorrectedSGD


def refuse_operation(op: Any) -> None:
    """Name what cannot give right gradients before anything is sent.

    Args:
        op: Horovod's, of the optimizer.

    Raises:
        UnsupportedError: It is Min, Max, Product or Adasum.
    """
    import horovod.torch as hvd

    refused = {getattr(hvd, name): name for name in ("Min", "Max", "Product", "Adasum")}
    if op in refused:
        raise UnsupportedError(
            f"op=hvd.{refused[op]} cannot be applied to sparse gradients: use hvd.Average or "
            "hvd.Sum"
        )


def refuse_unregistered(optimizer: Any) -> None:
    """Check that Horovod reduces all gradients: of the parameters that it found when it wrapped.

    Those that come later, by `add_param_group`, and those that required no gradient then, keep
    their own gradients on each rank, without a word of Horovod's.

    Raises:
        UnsupportedError: It does not; the parameters are named.
    """
    names = optimizer._parameter_names
    missed = [
        repr(names[p]) if p in names else f"one of shape {tuple(p.shape)}"
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p not in optimizer._requires_update
    ]
    if missed:
        raise UnsupportedError(
            f"Horovod does not reduce the gradients of {', '.join(missed)}: these parameters "
            "came, or were thawed, after hvd.DistributedOptimizer had wrapped the optimizer. "
            "Give it all parameters, thawed; or drop it and wrap again, with a new compression"
        )


def refuse_double_momentum(optimizer: Any, corrected: Mapping[Parameter, MemoryOptions]) -> None:
    """Check that momentum is applied once: by the compression's correction, or by the optimizer.

    Args:
        optimizer: The one that Horovod wraps.
        corrected: What is done to the gradients of the parameters that are corrected.

    Raises:
        ConfigError: It would apply momentum a second time, or another one.
    """
    for group in optimizer.param_groups:
        memories = [corrected[p] for p in group["params"] if p in corrected]
        for memory in memories:
            if isinstance(optimizer, MomentumCorrectedSGD):
                theirs = (group["momentum"], group["nesterov"])
                ours = (memory.momentum, memory.nesterov)
                if theirs != ours:
                    raise ConfigError(
                        "momentum and nesterov must be the same in the compression and in the "
                        f"optimizer, got {ours} and {theirs}"
                    )
            elif group.get("momentum") or (group.get("betas") or (0,))[0]:
                own = {key: group[key] for key in ("momentum", "betas") if key in group}
                told = ", ".join(f"{key}={value}" for key, value in own.items())
                raise ConfigError(
                    f"the compression corrects momentum={memory.momentum:g}, and the optimizer "
                    f"({told}) would apply momentum a second time: use "
                    "hvd_sparse.MomentumCorrectedSGD, or hvd_sparse.dgc_sgd, which makes the pair; "
                    "or momentum=0 in the compression"
                )


def warn_of_slow_settings() -> None:
    """Warn of Horovod settings under which its small tensors are expensive."""
    for variable in ("HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD"):
        if os.environ.get(variable) == "0":
            warnings.warn(f"hvd_sparse: {variable}=0 makes every step slow: unset it", stacklevel=2)
    if os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        warnings.warn(
            "hvd_sparse: HOROVOD_AUTOTUNE tunes Horovod on small tensors here: unset it",
            stacklevel=2,
        )
