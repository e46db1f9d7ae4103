"""What an optimizer or a setting of Horovod's may not be: refused by name, or warned of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from hvd_sparse.errors import ConfigError, UnsupportedError, warn
from hvd_sparse.memories import MemoryOptions
from hvd_sparse.optim import MomentumCorrectedSGD, parameters_of, reducer_of

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


def refuse_unregistered(optimizer: Any) -> None:
    """Check that Horovod reduces all gradients: of the parameters that it found when it wrapped.

    Those that come later, by `add_param_group`, and those that required no gradient then, keep
    their own gradients on each rank; Horovod silently skips them.

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
    is_ours = isinstance(getattr(optimizer, "optim", optimizer), MomentumCorrectedSGD)  # or sharded
    for group in optimizer.param_groups:
        memories = [corrected[p] for p in group["params"] if p in corrected]
        for memory in memories:
            if is_ours:
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

    lone = [p for p in parameters_of(optimizer) if p not in corrected]
    if corrected and lone and not is_ours:
        warn(
            f"the compression's momentum is for {len(corrected)} tensors; {len(lone)} others, which"
            " are dense, get none: use hvd_sparse.MomentumCorrectedSGD, which gives it to them"
        )


class ClippedMomenta:
    """Refuses to clip what the compression has applied momentum to: it is a sum of momenta.

    A pre-step hook of an optimizer. Clipped gradients have one norm in step after step.

    Args:
        optimizer: Horovod's, or one of a model's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._norms: list[float] = []
        self._looks = LOOKS
        optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: Any, *_: object) -> None:
        is_reduced = getattr(optimizer, "_synchronized", True)
        if getattr(optimizer, "_should_synchronize", False) or not is_reduced:
            return  # no script has had the gradients before this step
        if not self._looks:
            return
        parameters = parameters_of(optimizer)
        reducers = [(p, reducer_of(p)) for p in parameters]
        if any(by is not None and by.corrects_momentum(p) for p, by in reducers):
            self._looks -= 1
            gradients = [p.grad for p in parameters if p.grad is not None]
            self._norms.append(math.hypot(*(float(g.norm()) for g in gradients)))
        last = self._norms[-EQUAL_NORMS:]
        if len(last) == EQUAL_NORMS and 0 < max(last) < (1 + NORM_TOLERANCE) * min(last):
            raise ConfigError(
                f"gradients are clipped to a norm of {last[-1]:.3g} after they were reduced, where "
                "the compression has made sums of momenta of them: give it clip_norm, which clips "
                "before, in the place of clip_grad_norm_()"
            )
