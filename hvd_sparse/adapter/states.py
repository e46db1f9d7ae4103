"""What a compression saves and loads: one rank's state, and checkpoints of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.fate import Fates
from hvd_sparse.adapter.session import Session, as_horovod_error
from hvd_sparse.engine import Engine
from hvd_sparse.engine.checkpoint import load_checkpoint, save_checkpoint
from hvd_sparse.errors import TransportTimeout
from hvd_sparse.planner import planner_of

if TYPE_CHECKING:
    from hvd_sparse.transports.connect import HorovodBootstrap

Shapes = dict[str, tuple[int, ...]]


class States:
    """Between an engine, which has residuals by name, and what a user saves and loads.

    States and checkpoints may be loaded before the first step. What they are to be checked against,
    the optimizer's parameters and its loss scaler, is known only then: `bind` brings it.

    Args:
        engine: Has the residuals.
        session: Connects the ranks from the first step on.
        timeout_s: Seconds after which ranks that do not come to a checkpoint are given up.
    """

    def __init__(self, engine: Engine, session: Session, timeout_s: float) -> None:
        self._engine, self._session = engine, session
        self._timeout_s = timeout_s
        self._fates: Fates | None = None
        self._shapes: Shapes | None = None
        self._loaded_unit: float | None = None
        self._loaded_strictly: bool | None = None

    def know(self, parameters: Parameters) -> None:
        """Take note of the parameters; a state that was loaded before is checked against them.

        Raises:
            ConfigError: It does not belong to them.
        """
        self._shapes = {name: tuple(p.shape) for name, p in parameters}
        if self._loaded_strictly is not None:
            self.load(self.save(), strict=self._loaded_strictly)

    def bind(self, fates: Fates) -> None:
        """Take note of what knows the loss scale that residuals are in units of."""
        self._fates = fates
        fates.unit = self._loaded_unit

    def save(self) -> dict[str, Any]:
        """This rank's state."""
        unit = self._loaded_unit if self._fates is None else self._fates.unit
        planner = planner_of(self._engine.assignment)
        plan = None if planner is None else planner.state_dict()
        return {**self._engine.state_dict(), "unit": unit, "planner": plan}

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        self._engine.load_state_dict(state, strict=strict, shapes=self._shapes)
        self._loaded_strictly = strict if self._shapes is None else None
        self._take_unit(state.get("unit"))
        self._take_plan(state.get("planner"))

    def save_checkpoint(self, path: str | os.PathLike[str], process_set: Any) -> None:
        self._engine.check_between_steps("save_checkpoint()")
        world, gather = self._world(process_set, "save_checkpoint()")
        save_checkpoint(path, self.save, world.rank, world.size, gather)

    def load_checkpoint(self, path: str | os.PathLike[str], process_set: Any, missing: str) -> None:
        self._engine.check_between_steps("load_checkpoint()")
        world, gather = self._world(process_set, "load_checkpoint()")
        loaded = load_checkpoint(path, world.rank, world.size, gather, missing, self._shapes)
        self._engine.load_state_dict(loaded.state, strict=False)
        if loaded.dropped:
            self._engine.count_dropped(loaded.dropped_l1, "; ".join(loaded.dropped))
        self._loaded_strictly = missing == "refuse" if self._shapes is None else None
        self._take_unit(loaded.state["unit"])
        self._take_plan(loaded.state["planner"])

    def _world(
        self, process_set: Any, call: str
    ) -> tuple[HorovodBootstrap, Callable[[Any], list[Any]]]:
        """The ranks of a process set, or all of Horovod's, and how they gather objects."""
        from hvd_sparse.transports.connect import HorovodBootstrap

        world = HorovodBootstrap(process_set)

        def gather(mine: Any) -> list[Any]:
            if self._session.is_current():  # it names who fails
                return self._session.gather_objects(mine, "checkpoint")
            with as_horovod_error():
                try:
                    return world.allgather_object(mine, "hvd_sparse.checkpoint", self._timeout_s)
                except TransportTimeout:
                    raise TransportTimeout(
                        f"rank {world.rank} has waited {self._timeout_s:g} s in {call} for the "
                        f"other {world.size - 1} ranks: all of them must call it together"
                    ) from None

        return world, gather

    def _take_plan(self, plan: Mapping[str, Any] | None) -> None:
        planner = planner_of(self._engine.assignment)
        if planner is None:
            return
        if plan is not None:
            planner.load_state_dict(plan)
        self._session.agree_again()  # momenta are where the state's plan had them

    def multiply_unit(self, factor: float) -> None:
        """The loss has another scale from now on; residuals have followed."""
        unit = self._loaded_unit if self._fates is None else self._fates.unit
        self._take_unit((1.0 if unit is None else unit) * factor)

    def _take_unit(self, unit: float | None) -> None:
        self._loaded_unit = unit
        if self._fates is not None and unit is not None:
            self._fates.unit = unit  # what the scaler's scale differs by, the next step mends
