"""Momentum changes sides with its tensor: between the optimizer and the compression.

The optimizer has the momentum of gradients as it sees them: averaged or summed, and of the unscaled
loss. The compression has that of sums over the ranks, each rank its share. Only
`MomentumCorrectedSGD` has momentum on both sides; under any other optimizer there is nothing to
hand over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.adapter.binding import Entry, Parameters, spec_of
from hvd_sparse.adapter.planning import planned_memory
from hvd_sparse.adapter.refusals import refuse_double_momentum
from hvd_sparse.engine import Assignment, Engine, Method, WithDense
from hvd_sparse.errors import ConfigError, warn
from hvd_sparse.optim import MomentumCorrectedSGD, SparseAdamW, parameters_of

BUFFER = "momentum_buffer"


class Handover:
    """What is to change sides, seen before the engine gets another assignment.

    Args:
        optimizers: Have the momentum of tensors that the compression has none of.
        engine: Has that of the others.
        after: The engine's assignment to be.
        named: Parameters of types that the engine can reduce.
        dense_below: Tensors of fewer elements are dense.
        scale: What the optimizer sees, in units of the sums over the ranks.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        engine: Engine,
        after: Assignment,
        named: Sequence[tuple[str, Parameter]],
        dense_below: int,
        scale: float = 1.0,
    ) -> None:
        self._engine, self._scale = engine, scale
        correcting = [o for o in optimizers if isinstance(o, MomentumCorrectedSGD)]
        groups = [(o, group) for o in correcting for group in o.param_groups]
        self._state_by_id = {id(p): o.state for o, group in groups for p in group["params"]}
        self._out: list[tuple[str, Parameter]] = []
        self._in: list[tuple[str, Parameter]] = []
        before = engine.assignment
        for name, parameter in named:
            if id(parameter) not in self._state_by_id:
                continue
            methods = (method_of(a, name, parameter, dense_below) for a in (before, after))
            had, has = (method is not None and method.memory.momentum > 0 for method in methods)
            if had != has:
                (self._out if had else self._in).append((name, parameter))
        if self.moves and any(hasattr(o, "optim") for o in optimizers):
            warn("the optimizer is sharded: momenta do not change sides")
            self._out, self._in = [], []

    @property
    def moves(self) -> list[str]:
        """The tensors whose momenta are to change sides."""
        return [name for name, _ in (*self._out, *self._in)]

    def give_up(self) -> None:
        """Momenta begin anew: nobody is there to hand them over with."""
        for _, parameter in self._in:
            self._state_of(parameter).pop(BUFFER, None)

    def _state_of(self, parameter: Parameter) -> Any:
        return self._state_by_id[id(parameter)][parameter]

    def carry_out(self, unit: float, world_size: int) -> None:
        """Move momenta; all ranks call this, once they have agreed on the new assignment.

        Args:
            unit: The loss scale that gradients are in units of.
            world_size: P.
        """
        if not self.moves:
            return
        scale = self._scale / unit
        shapes = {name: tuple(parameter.shape) for name, parameter in self._out}
        for (_, parameter), total in zip(
            self._out, self._engine.take_momentum(shapes), strict=True
        ):
            state = self._state_of(parameter)
            handed = (total * scale).to(parameter)
            state[BUFFER] = handed + state[BUFFER] if BUFFER in state else handed
        for name, parameter in self._in:
            buffer: Tensor | None = self._state_of(parameter).pop(BUFFER, None)
            if buffer is not None:
                share = buffer.detach().to(torch.float32) / (scale * world_size)
                self._engine.give_momentum(spec_of(name, parameter), share)


def method_of(
    assignment: Assignment, name: str, parameter: Parameter, dense_below: int
) -> Method | None:
    """The method that an assignment gives a tensor; None where the tensor is dense."""
    if not isinstance(assignment, WithDense) and parameter.numel() < max(1, dense_below):
        return None
    return assignment.choice_of(spec_of(name, parameter)).method


def has_memory(assignment: Assignment, entry: Entry, dense_below: int) -> bool:
    """Whether an assignment gives a tensor's gradients momentum, or the units of `SparseAdamW`."""
    if (name := entry.name) is None:
        return False
    method = method_of(assignment, name, entry.parameter, dense_below)
    own = None if method is None else method.memory
    memory = planned_memory(assignment, name, entry.parameter) or own
    return memory is not None and (memory.momentum > 0 or memory.preconditioned)


def left_dense(
    parameters: Parameters, assignment: Assignment, dense_below: int
) -> dict[str, list[str]]:
    """Names of the tensors that an assignment leaves to Horovod, by the reason."""
    found: dict[str, list[str]] = {}
    sparse = {name for name, _ in parameters.sparse()}
    for name, p in parameters:
        if planned_memory(assignment, name, p) is not None:
            continue
        if name not in sparse:
            why = f"of type {p.dtype}"
        elif method_of(assignment, name, p, dense_below) is not None:
            continue
        else:
            why = f"under dense_below={dense_below}" if p.numel() < dense_below else "by the policy"
        found.setdefault(why, []).append(name)
    return found


def refuse_momenta(
    optimizer: Any, parameters: Parameters, assignment: Assignment, dense_below: int
) -> None:
    """Check that momentum is applied once, by the optimizer or by an assignment.

    Where both delay gradients, this warns. Preconditioning is a matter between these two, too.

    Raises:
        ConfigError: It is not, for a tensor that is named; or the optimizer has no such units.
    """
    corrected, planned, delayed = {}, [], set()
    mine = set(parameters_of(optimizer))
    for name, parameter in parameters.sparse():
        if parameter not in mine:
            continue
        method = method_of(assignment, name, parameter, dense_below)
        memory = planned_memory(assignment, name, parameter)
        if memory is not None:
            planned.append(memory)
        elif method is not None:
            memory = method.memory
        if memory is None:
            continue
        if memory.momentum > 0:
            corrected[parameter] = memory
        elif memory.preconditioned and not isinstance(optimizer, SparseAdamW):
            raise ConfigError(
                "preconditioned=True needs hvd_sparse.SparseAdamW as the optimizer, got "
                f"{type(optimizer).__name__}: hvd_sparse.sparse_adamw makes the pair"
            )
        elif not memory.preconditioned and (method is None or method.density < 1):
            delayed.add(parameter)
    refuse_double_momentum(optimizer, corrected)
    momentum = max((memory.momentum for memory in planned), default=0.0)
    if momentum > 0 and not isinstance(optimizer, MomentumCorrectedSGD):
        raise ConfigError(
            f"compress: auto with momentum={momentum:g} needs hvd_sparse.MomentumCorrectedSGD, "
            "which has the momentum of tensors that are left dense, got "
            f"{type(optimizer).__name__}"
        )
    for group in optimizer.param_groups:
        if (group.get("betas") or (0,))[0] and not delayed.isdisjoint(group["params"]):
            warn(
                f"{type(optimizer).__name__} has a momentum (betas), and gradients that wait in a "
                "residual gather one there: together they cost up to 41 % of the loss in our "
                "tests. Use hvd_sparse.sparse_adamw, or betas=(0.0, …)"
            )
            break
