"""Momentum must be applied once: by the compression's correction, or by the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from hvd_sparse.errors import ConfigError
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.optim import MomentumCorrectedSGD


def refuse_double_momentum(optimizer: Any, corrected: Mapping[Parameter, MemoryOptions]) -> None:
    """Check an optimizer against the momentum correction of the gradients that it will get.

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
