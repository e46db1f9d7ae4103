"""A planner beside a training: measures through Horovod, times steps, and counts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.engine import Engine, TensorSpec
from hvd_sparse.errors import UnsupportedError
from hvd_sparse.planner import Planner, World
from hvd_sparse.planner.trial import TIMED_STEPS
from hvd_sparse.transports import Transport
from hvd_sparse.transports.horovod_handles import outcome_of


def horovods_allreduce(process_set: Any) -> Any:
    """Horovod's dense allreduce, in place, under names of its own."""
    import horovod.torch as hvd

    def allreduce(tensor: Tensor) -> object:
        name = f"hvd_sparse.planner.{tensor.numel()}"
        return outcome_of(
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=process_set)
        )

    return allreduce


def refuse_devices(parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Costs are measured on the CPU: elsewhere they would say nothing.

    Raises:
        UnsupportedError: A parameter is on another device.
    """
    for name, p in parameters:
        if p.device.type != "cpu":
            raise UnsupportedError(
                f"compress: auto plans for CPU training, but {name} is on {p.device}: say always "
                "or never"
            )


class Planning:
    """One planner in one world.

    Args:
        planner: Decides; it is the engine's assignment.
        engine: What exchanges by its decisions.
        specs: The parameters in the order in which they were named; gradients come the other way.
        transport: The engine's.
        process_set: Horovod's name for the world.
    """

    def __init__(
        self,
        planner: Planner,
        engine: Engine,
        specs: Sequence[TensorSpec],
        transport: Transport,
        process_set: Any,
    ) -> None:
        self._planner = planner
        self._engine = engine
        self._specs = list(reversed(specs))
        self._transport = transport
        self._ready: dict[str, float] = {}
        self._timed: deque[tuple[float, float]] = deque(maxlen=TIMED_STEPS)
        planner.decide(self._specs, World(transport, horovods_allreduce(process_set)))
        self._steps_left = planner.steps_to_review
        self._began_at = self._returned_at = perf_counter()

    def arrived(self, name: str) -> None:
        """A gradient is there; of interest in the last step before a review."""
        if self._steps_left == 1:
            self._ready[name] = perf_counter()

    def returned(self) -> None:
        """A reduced gradient goes back; the last one ends the step's reductions."""
        self._returned_at = perf_counter()

    def begin_step(self) -> None:
        """Review the plan where that is due; all ranks begin the same steps."""
        now = perf_counter()
        self._timed.append((now - self._began_at, self._returned_at - self._began_at))
        self._steps_left -= 1
        if self._steps_left == 0:
            self._review()
            now = perf_counter()
        self._began_at = now

    def _review(self) -> None:
        first = min(self._ready.values(), default=0.0)
        ready_s = {name: at - first for name, at in self._ready.items()}
        timed = torch.tensor(list(self._timed), dtype=torch.float64)
        self._ready = {}
        changed = self._planner.review(self._specs, ready_s, timed, self._transport)
        self._steps_left = self._planner.steps_to_review
        if changed:
            self._engine.reassign(self._planner)
            self._engine.agree()
