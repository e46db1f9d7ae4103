"""Optimizers for compressed gradients: SGD with momentum, and AdamW."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw
from torch.utils.weak import WeakTensorKeyDictionary

from hvd_sparse.errors import UnsupportedError

REDUCED_BY: Any = WeakTensorKeyDictionary()
"""For each parameter a weak reference to what reduces its gradients, and knows how."""
APPLIED_BY: Any = WeakTensorKeyDictionary()
"""For each parameter a weak reference to the optimizer of this module that updates it, or will."""


def reducer_of(parameter: object) -> Any:
    """What reduces a parameter's gradients sparsely; None where nothing does."""
    reference = REDUCED_BY.get(parameter) if isinstance(parameter, Tensor) else None
    return None if reference is None else reference()


def optimizer_of(parameter: Parameter) -> Any:
    """The optimizer of this module that updates a parameter, or will; None where none does."""
    reference = APPLIED_BY.get(parameter)
    return None if reference is None else reference()


def exponents_of(parameter: Parameter) -> Tensor | None:
    """The units of `SparseAdamW` for a parameter; None for any other optimizer."""
    optimizer = optimizer_of(parameter)  # the same on all ranks, whatever else is alive
    exponent: Tensor | None = getattr(optimizer, "state", {}).get(parameter, {}).get("exponent")
    return exponent


def parameters_of(optimizer: Any) -> list[Parameter]:
    """All that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_due(parameter: Parameter) -> bool:
    """Whether a step applies its gradient: zeros of a frozen one are Horovod's, or nothing new."""
    gradient = parameter.grad
    return gradient is not None and (parameter.requires_grad or bool(gradient.any()))


class Known(torch.optim.Optimizer):
    """An optimizer that is known by its parameters."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer does."""
        super().add_param_group(param_group)
        APPLIED_BY.update((p, weakref.ref(self)) for p in self.param_groups[-1]["params"])


class MomentumCorrectedSGD(Known):
    """Momentum SGD that leaves the momentum of compressed gradients to the compression.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018), and the optimizer of its release.
    A gradient after momentum correction contains its momentum. Only weight decay, which is added
    here, still needs one: w = m w + λ p; p -= lr (g + w). Every other gradient (small tensors, one
    worker, no compression) gets ordinary momentum, as from `torch.optim.SGD`. A parameter that
    requires no gradient does not change by zeros, which Horovod gives it.

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
        self._has_zeros = False
        given = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**given, "dampening": 0.0})  # torch.optim.SGD asks for it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As any optimizer does; UnsupportedError where the group asks for more than there is."""
        if param_group.get("dampening") or param_group.get("maximize"):
            raise UnsupportedError("MomentumCorrectedSGD has neither dampening nor maximize")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, also of `torch.optim.SGD`; UnsupportedError where it asks for more."""
        super().__setstate__(state)
        self._has_zeros = True
        if any(group["dampening"] or group.get("maximize") for group in self.param_groups):
            raise UnsupportedError("MomentumCorrectedSGD has neither dampening nor maximize")

    def state_dict(self) -> dict[str, Any]:
        """As that of `torch.optim.SGD`, with zeros where the compression has the momentum.

        They stay until the next step: Horovod broadcasts into what is returned here.
        """
        self._has_zeros = True
        for group in self.param_groups:
            for p in group["params"]:
                if group["momentum"] and self.state[p].get("momentum_buffer") is None:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return super().state_dict()

    def _drop_zeros(self) -> None:
        self._has_zeros = False
        for its in self.state.values():
            if (buffer := its.get("momentum_buffer")) is None or not buffer.any():
                its.pop("momentum_buffer", None)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters once; `closure` evaluates the model again, for the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if self._has_zeros:
            self._drop_zeros()
        for group in self.param_groups:
            for parameter in group["params"]:
                if is_due(parameter):
                    reducer = reducer_of(parameter)
                    corrected = reducer is not None and reducer.corrects_momentum(parameter)
                    self._update(parameter, group, corrected)
        return loss

    def _update(self, parameter: Parameter, group: dict[str, Any], corrected: bool) -> None:
        m, decay = group["momentum"], group["weight_decay"]
        gradient = parameter.grad
        assert gradient is not None
        rest = gradient.new_zeros(()) if corrected else gradient
        if decay:
            rest = rest + decay * parameter
        had = "momentum_buffer" in self.state.get(parameter, ())
        if m and (decay or had or not corrected):
            state = self.state[parameter]
            if had:
                state["momentum_buffer"].mul_(m).add_(rest)
            else:
                state["momentum_buffer"] = rest.clone()
            buffer = state["momentum_buffer"]
            rest = rest + m * buffer if group["nesterov"] else buffer
        if corrected:
            rest = gradient + rest if decay or had else gradient
        parameter.add_(rest, alpha=-group["lr"])


REFRESH_STEPS = 32
"""Steps between two looks at v: with β2 = 0.999 its root changes by 2 % meanwhile."""
MOST_EXPONENT = 60
SQRT2_BITS = 0x3504F3  # of float32's mantissa
OPTIONS = ("foreach", "capturable", "differentiable", "fused", "amsgrad", "maximize", "lr", "eps")


class SparseAdamW(Known, torch.optim.AdamW):
    """AdamW that leaves the momentum of compressed gradients to their residuals.

    An entry that waits in a residual gathers the gradients of many steps, as momentum does; a
    second momentum goes on applying what was sent, and overshoots. So gradients that a compression
    has selected with `preconditioned=True` get β1 = 0, and others ordinary AdamW. The compression
    reads √v̂ + ε here, rounded to powers of two, every 32 steps, and every 4 of the first 32.

    States of `torch.optim.AdamW` can be loaded here, and the other way round: the momentum of
    compressed gradients then begins anew.

    The arguments are those of `torch.optim.AdamW`; β1 is for gradients that stay dense.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, also of `torch.optim.AdamW`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for parameter, its in ((p, its) for p, its in self.state.items() if its):
            exponent = its.get("exponent", torch.zeros_like(parameter)).contiguous()
            its["exponent"] = exponent.to(torch.int8)  # torch gives it the parameter's type

    def state_dict(self) -> dict[str, Any]:
        """As that of `torch.optim.AdamW`, with zeros where a momentum begins anew.

        Horovod broadcasts into what is returned here: units become new objects, as when loaded.
        Where there was no state, it would make one by a step, which decays this worker's weights.
        """
        for group in self.param_groups:
            group.setdefault("sparse_steps", 0)
            for p in group["params"]:
                if p.requires_grad and not self.state.get(p):
                    self._state_of(p, group, group["betas"][0])
        for its in self.state.values():
            if "exponent" in its:
                its["exponent"] = its["exponent"].clone()
        packed: dict[str, Any] = super().state_dict()
        for key, its in packed["state"].items():
            if its and "exp_avg" not in its:
                packed["state"][key] = {**its, "exp_avg": torch.zeros_like(its["exp_avg_sq"])}
        return packed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters once; `closure` evaluates the model again, for the loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        refreshes = False
        for group in self.param_groups:
            parts: dict[bool, list[Parameter]] = {False: [], True: []}
            for p in filter(is_due, group["params"]):
                reducer = reducer_of(p)
                parts[reducer is not None and reducer.preconditions(p)].append(p)
            beta1, beta2 = group["betas"]
            has_new = any(map(self._has_no_unit, parts[True]))
            self._update(group, parts[False], beta1, beta2)
            self._update(group, parts[True], None, beta2)
            step = group["sparse_steps"] = group.get("sparse_steps", 0) + 1
            is_due_now = step % (4 if step < REFRESH_STEPS else REFRESH_STEPS) == 0 or step < 4
            refreshes |= bool(parts[True]) and (is_due_now or has_new)
        if refreshes:
            self._refresh()
        return loss

    def _has_no_unit(self, parameter: Parameter) -> bool:
        """Whether a compressed gradient is the first one, or had a momentum until now."""
        its: dict[str, Any] = self.state.get(parameter, {})
        return not its or ("exp_avg" in its and (not its["step"] or bool(its["exp_avg"].any())))

    def _refresh(self) -> None:
        """Take the units of all compressed gradients from v."""
        held = [
            (p, its, group)
            for group in self.param_groups
            for p in group["params"]
            if (its := self.state.get(p)) and "exp_avg" not in its
        ]
        vs = ((_unbiased(its, group["betas"][1]), group["eps"]) for _, its, group in held)
        for (p, its, _), exponent in zip(held, exponents(vs), strict=True):
            its["exponent"] = exponent
            APPLIED_BY[p] = weakref.ref(self)

    def _update(
        self, group: dict[str, Any], parameters: list[Parameter], beta1: float | None, beta2: float
    ) -> None:
        """Update some parameters of a group; without a `beta1` there are no momenta."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise UnsupportedError(
                "SparseAdamW does not take sparse gradients, as torch's AdamW does not: give their "
                "parameters to torch.optim.SparseAdam"
            )
        states = [self._state_of(p, group, beta1) for p in parameters]
        averages = [its["exp_avg"] for its in states if beta1 is not None]
        if beta1 is None:  # with β1 = 0 torch writes the gradient over itself
            averages = [-g if group["maximize"] else g.data for g in gradients]
        adamw(
            list(parameters),
            gradients,
            averages,
            [its["exp_avg_sq"] for its in states],
            [its["max_exp_avg_sq"] for its in states if group["amsgrad"]],
            [its["step"] for its in states],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            beta1=beta1 or 0.0,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            has_complex=any(map(torch.is_complex, parameters)),
            **{key: group[key] for key in OPTIONS},
        )

    def _state_of(self, parameter: Parameter, group: Any, beta1: float | None) -> dict[str, Any]:
        its: dict[str, Any] = self.state[parameter]
        if not its:
            on_device = group["capturable"] or group["fused"]
            device = parameter.device if on_device else torch.device("cpu")
            its["step"] = torch.zeros((), dtype=torch.float32, device=device)
            its["exp_avg_sq"] = torch.zeros_like(parameter)
            if group["amsgrad"]:
                its["max_exp_avg_sq"] = torch.zeros_like(parameter)
            its["exponent"] = torch.zeros(
                parameter.shape, dtype=torch.int8, device=parameter.device
            )
        if beta1 is None:
            its.pop("exp_avg", None)
        elif "exp_avg" not in its:
            its["exp_avg"] = torch.zeros_like(parameter)
        return its


def _unbiased(its: dict[str, Any], beta2: float) -> Tensor:
    """v̂ of a state."""
    v: Tensor = its["exp_avg_sq"]
    bias: Tensor = 1 - beta2 ** its["step"].to(v.device)
    return v / bias.clamp(min=1e-8)


def exponents(vs: Iterable[tuple[Tensor, float]]) -> list[Tensor]:
    """The e with 2^e next to √v + ε, contiguous int8 in v's shape, for each v and ε.

    Where v is 0, nothing has been sent yet. There e is the mean of the tensor's other elements, or
    of all tensors': as ε, such elements would come before all others, and as 1 never. Integers are
    summed, so that every rank has the same.
    """
    found, sums = [], []
    for v, eps in vs:
        never = v == 0
        bits = v.float().sqrt().add_(eps).view(torch.int32).add_((1 << 23) - SQRT2_BITS)  # rounds
        e = (bits >> 23).sub_(127).clamp_(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)
        found.append((e.masked_fill_(never, 0).contiguous(), never))
        sums.append(torch.stack([e.sum(dtype=torch.int64), torch.count_nonzero(v)]))
    of_all = torch.stack([each.to(sums[0].device) for each in sums]).sum(0)
    for (e, never), own in zip(found, sums, strict=True):
        total, seen = torch.where(own[1] > 0, own, of_all.to(own.device))
        e.masked_fill_(never, total.div(seen.clamp(min=1), rounding_mode="floor").to(torch.int8))
    return [e for e, _ in found]
