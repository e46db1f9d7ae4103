"""What an optimizer or a setting of Horovod's may not be: refused by name, or warned of."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

from torch.nn import Parameter

from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.errors import ConfigError, UnsupportedError, warn
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.optim import MomentumCorrectedSGD

LOOKS, EQUAL_NORMS, NORM_TOLERANCE = 50, 3, 1e-4
"""Steps in which `ClippedMomenta` looks, and how many with one norm are no coincidence."""


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


def refuse_strangers(parameters: Parameters, optimizer: Any) -> None:
    """Check that a compression was given its optimizer's parameters.

    Raises:
        ConfigError: It has none of them.
    """
    if not any(p in parameters for p in optimizer._parameter_names):
        raise ConfigError(
            "named_parameters of the compression must be those of the optimizer, got none of its "
            f"{len(optimizer._parameter_names)} parameters"
        )


def refuse_join(count: float, total: float, world_size: int) -> None:
    """Check the sums of 1 and of rank + 1 over the ranks.

    Raises:
        UnsupportedError: A rank has brought nothing, as one does that has joined.
    """
    if (count, total) != (world_size, world_size * (world_size + 1) / 2):
        raise UnsupportedError(
            "sparse gradients can be summed or averaged over all ranks of a process set, but "
            f"Horovod reduced [1, rank + 1] to [{count:g}, {total:g}] over {world_size} ranks: "
            "hvd.join() cannot be used"
        )


def refuse_embeddings_as_dense(optimizer: Any) -> None:
    """Say that Horovod would make dense gradients of those that `exchange_embeddings` takes.

    Raises:
        ConfigError: The optimizer was told to.
    """
    if getattr(optimizer, "sparse_as_dense", False):
        raise ConfigError(
            "sparse_as_dense must be False with exchange_embeddings, got True: leave one of them "
            "out"
        )


def refuse_a_second_optimizer() -> NoReturn:
    """Say that a compression listens to one optimizer: which of its steps were applied, and so on.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        "a compression serves one optimizer, but a second hvd.DistributedOptimizer uses this one: "
        "make one compression for each"
    )


class Registered:
    """The parameters whose gradients Horovod reduces: those that it found when it wrapped.

    Parameters that come later, by `add_param_group`, and those that required no gradient then, keep
    their own gradients on each rank; Horovod silently skips them.

    Args:
        optimizer: Horovod's, which registers its hooks once.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._known: list[bool] = []

    def refuse_others(self) -> None:
        """Check it again, where a parameter was added, frozen or thawed.

        Raises:
            UnsupportedError: Horovod does not reduce all gradients; the parameters are named.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        groups = optimizer.param_groups
        known = [p.requires_grad for group in groups for p in group["params"]]
        if known == self._known:
            return
        names = optimizer._parameter_names
        missed = [
            repr(names[p]) if p in names else f"one of shape {tuple(p.shape)}"
            for group in groups
            for p in group["params"]
            if p.requires_grad and p not in optimizer._requires_update
        ]
        if missed:
            raise UnsupportedError(
                f"Horovod does not reduce the gradients of {', '.join(missed)}: these parameters "
                "came, or were thawed, after hvd.DistributedOptimizer had wrapped the optimizer. "
                "Give it all parameters, thawed; or drop it and wrap again, with a new compression"
            )
        self._known = known


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

    lone = [p for group in optimizer.param_groups for p in group["params"] if p not in corrected]
    if corrected and lone and not isinstance(optimizer, MomentumCorrectedSGD):
        warn(
            f"the compression's momentum is for {len(corrected)} tensors; {len(lone)} others, which"
            " are dense, get none: use hvd_sparse.MomentumCorrectedSGD, which gives it to them"
        )


class ClippedMomenta:
    """Refuses to clip what the compression has applied momentum to: it is a sum of momenta.

    A pre-step hook of Horovod's optimizer. Clipped gradients have one norm in step after step.

    Args:
        optimizer: Horovod's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._norms: list[float] = []
        self._hook = optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: Any, *_: object) -> None:
        if optimizer._should_synchronize or not optimizer._synchronized:
            return  # no script has synchronized before this step
        corrects = getattr(optimizer._compression, "corrects_momentum", None)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if corrects is not None and any(map(corrects, parameters)):
            gradients = [p.grad for p in parameters if p.grad is not None]
            self._norms.append(math.hypot(*(float(g.norm()) for g in gradients)))
        last = self._norms[-EQUAL_NORMS:]
        if len(self._norms) >= LOOKS or corrects is None:
            self._hook.remove()
        if len(last) == EQUAL_NORMS and 0 < max(last) < (1 + NORM_TOLERANCE) * min(last):
            raise ConfigError(
                f"gradients are clipped to a norm of {last[-1]:.3g} after synchronize(), where the "
                "compression has made sums of momenta of them: give it clip_norm, which clips "
                "before, in the place of clip_grad_norm_()"
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
