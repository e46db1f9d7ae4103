"""SGD for gradients that already contain their momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter


class MomentumCorrectedSGD(torch.optim.Optimizer):
    """Momentum SGD that leaves the momentum of compressed gradients to the compression.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018), and the optimizer of its release.
    A gradient after momentum correction contains its momentum. Only weight decay, which is added
    here, still needs one: w = m w + λ p; p -= lr (g + w). Every other gradient (small tensors, one
    worker, no `hvd.DistributedOptimizer`) gets ordinary momentum, as from `torch.optim.SGD`. A
    parameter that no longer requires a gradient does not change, although Horovod gives it a
    gradient of zeros.

    Args:
        params: As for any optimizer.
        lr: Learning rate, at least 0.
        momentum: m, in [0, 1); must equal the compression's.
        weight_decay: λ, at least 0.
        nesterov: Whether to use Nesterov momentum; must equal the compression's.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0 or (name == "momentum" and value >= 1):
                allowed = "in [0, 1)" if name == "momentum" else "at least 0"
                raise ValueError(f"{name} must be {allowed}, got {value}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters once.

        Args:
            closure: Evaluates the model again and returns the loss; or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compression = getattr(self, "_compression", None)  # Horovod's optimizer has one
        corrects = getattr(compression, "corrects_momentum", lambda parameter: False)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.requires_grad:
                    self._update(parameter, group, corrects(parameter))
        return loss

    def _update(self, parameter: Parameter, group: dict[str, Any], corrected: bool) -> None:
        m, decay = group["momentum"], group["weight_decay"]
        gradient = parameter.grad
        assert gradient is not None
        rest = gradient.new_zeros(()) if corrected else gradient
        if decay:
            rest = rest + decay * parameter
        update = gradient if corrected else rest
        if m and (decay or not corrected):
            state = self.state[parameter]
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = rest.clone()
            else:
                buffer.mul_(m).add_(rest)
            step = rest + m * buffer if group["nesterov"] else buffer
            update = gradient + step if corrected else step
        elif decay and corrected:
            update = gradient + rest
        parameter.add_(update, alpha=-group["lr"])
