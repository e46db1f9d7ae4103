"""Residuals as a part of `hvd.elastic.TorchState`.

After a fault every rank restores its own last commit, and `sync` gives all of them the weights of
rank 0. A death between two ranks' commits leaves one of them a commit behind. Weights of one commit
and residuals of another must not go on together: commits are marked, and `sync` compares the marks.

* where a rank stands where rank 0 does, it keeps its residuals;
* where it holds rank 0's commit, it goes back to it: the one before the last is kept for that;
* otherwise its residuals are dropped, with a warning and a count.

The ranks also tell each other how large their residuals are, so that survivors can say what was
lost with a rank that is gone.
"""

from __future__ import annotations

import copy
import math
import secrets
from typing import Any, NamedTuple

from horovod.common.elastic import State, notification_manager
from horovod.torch.elastic import state as horovod_state

from hvd_sparse.adapter.binding import callers
from hvd_sparse.engine.state import EngineState, l1_of
from hvd_sparse.errors import logger

SEARCHED_FRAMES = 8
"""From a handler's `save` up to the state's `commit`."""

SYNC = "hvd_sparse.elastic.sync"


class Mark(NamedTuple):
    """Where a rank stands; the same on two ranks means the same step of the same history.

    Attributes:
        sync: How many times the ranks had been synchronised.
        number: How many commits there had been.
        steps: Done since the last commit, which itself has 0.
    """

    sync: int = 0
    number: int = 0
    steps: int = 0


class Standing(NamedTuple):
    """What a rank tells the others in `sync`.

    Attributes:
        worker: A number that this process has drawn: ranks change with the world.
        mark: Where it stands.
        step: Steps done in all.
        unit: The loss scale of its residuals; None: not known.
        l1: L1 norm of its residuals.
        kept: The same of each commit that it holds.
    """

    worker: int
    mark: Mark
    step: int
    unit: float | None
    l1: float
    kept: dict[Mark, float]


class Commit(NamedTuple):
    """What a rank can go back to: the compression's state, and its books as of then.

    Attributes:
        mark: Its name.
        state: Of the compression.
        l1: L1 norm of its residuals.
        counts: `dropped_l1` and `lost_l1`, see `Stats`.
        l1_of: L1 norm of each worker's residuals.
    """

    mark: Mark
    state: dict[str, Any]
    l1: float
    counts: tuple[float, float]
    l1_of: dict[int, float]


class CompressionStateHandler(horovod_state.StateHandler):  # type: ignore[misc]
    """Commits and restores a compression that is given to `TorchState(compression=…)`."""

    def __init__(self, compression: Any) -> None:
        super().__init__(compression)
        self._worker = secrets.randbits(62)
        self._syncs = 0
        self._mark = Mark(number=-1)
        self._commits: list[Commit] = []
        self._l1_of: dict[int, float] = {}
        self.save()

    def save(self) -> None:
        """Keep a copy of the state; in a commit, all ranks tell each other of theirs first.

        Raises:
            HorovodInternalError: In a commit, a peer is gone, which is named; nothing is committed.
        """
        state = copy.deepcopy(self.value.state_dict())
        l1 = l1_of(state["residual"].values())
        number = self._tell_all(l1) if _is_called_by_commit() else self._mark.number
        mark = Mark(self._syncs, number + 1)
        engine = self.value._engine
        counts = engine.dropped_l1, engine.lost_l1
        commit = Commit(mark, state, l1, counts, dict(self._l1_of))
        before = [each for each in self._commits if each.mark == self._mark]
        self._commits, self._mark, self._base_step = [*before, commit], mark, state["step"]

    def restore(self) -> None:
        """Go back to the last commit of this rank; `sync` compares it with the others'."""
        self.value.give_up_step()
        self._go_back_to(self._commits[-1])

    def sync(self) -> None:
        """Bring the residuals to where rank 0 stands, whose weights all ranks get."""
        from hvd_sparse.transports.connect import HorovodBootstrap

        world = HorovodBootstrap()
        told = self._syncs, self._standing(), self.value.method.description
        with self.value._session.errors():
            everyone = world.allgather_object(told, SYNC, math.inf)
            if any(each != told[2] for *_, each in everyone):  # by `reassign`, before a rank came
                method = self.value.method if world.rank == 0 else None
                method = world.allgather_object(method, f"{SYNC}.method", math.inf)[0]
                if everyone[0][2] != told[2]:
                    self.value.reassign(method)
        standings: list[Standing] = [standing for _, standing, _ in everyone]
        mine, target = standings[world.rank], standings[0]
        where = target.mark
        if mine.mark != where:
            self._follow(mine, target)
        self._count_lost({standing.worker for standing in standings})
        self._l1_of = {
            each.worker: each.l1 if each.mark == where else each.kept.get(where, 0.0)
            for each in standings
        }
        self._syncs = max(syncs for syncs, *_ in everyone) + 1
        self._mark = where._replace(steps=0)
        self._base_step = int(self.value.state_dict()["step"]) - where.steps

    def _standing(self) -> Standing:
        state = self.value.state_dict()
        mark = self._mark._replace(steps=state["step"] - self._base_step)
        kept = {commit.mark: commit.l1 for commit in self._commits}
        l1 = l1_of(state["residual"].values())
        return Standing(self._worker, mark, state["step"], state["unit"], l1, kept)

    def _follow(self, mine: Standing, target: Standing) -> None:
        """Go to where rank 0 stands, or drop the residuals."""
        commit = next((each for each in self._commits if each.mark == target.mark), None)
        if commit is not None:
            logger.info("goes back from %s to %s, where rank 0 stands", mine.mark, target.mark)
            self._go_back_to(commit)
            return
        empty = EngineState(step=target.step, unit=target.unit)
        self.value.load_state_dict(empty.as_dict(), strict=False)
        if mine.l1 > 0:
            self.value._engine.count_dropped(
                mine.l1,
                f"the residuals of commit {mine.mark.number} (step {mine.step}): rank 0 goes on "
                f"from commit {target.mark.number} (step {target.step})",
            )

    def _go_back_to(self, commit: Commit) -> None:
        self.value.load_state_dict(commit.state, strict=False)  # its own; ranks may have moved
        engine = self.value._engine
        engine.dropped_l1, engine.lost_l1 = commit.counts
        self._l1_of = dict(commit.l1_of)
        self._mark, self._base_step = commit.mark, commit.state["step"]

    def _tell_all(self, l1: float) -> int:
        """All ranks of a connected world come here together; the most commits of any."""
        session, number = self.value._session, self._mark.number
        if not session.is_current():
            return number
        told = session.gather_objects((self._worker, l1, number), "commit")
        self._count_lost({worker for worker, *_ in told})
        self._l1_of = {worker: theirs for worker, theirs, _ in told}
        numbers: list[int] = [number for *_, number in told]
        return max(numbers)

    def _count_lost(self, present: set[int]) -> None:
        """Workers that are gone took their residuals along."""
        gone = self._l1_of.keys() - present
        self.value._engine.lost_l1 += sum(self._l1_of[worker] for worker in gone)


def _is_called_by_commit() -> bool:
    """Whether all ranks are here: `State.save` may be called on one alone, `commit` may not."""
    return State.commit.__code__ in [frame.f_code for frame in callers(SEARCHED_FRAMES)]


def register(cls: type) -> None:
    """Tell Horovod that this handler serves `cls`; once is enough."""
    registry = horovod_state.get_handler_registry()
    entry = (cls, CompressionStateHandler)
    if entry not in registry:
        horovod_state.set_handler_registry([*registry, entry])


def is_forgotten(compression: Any) -> bool:
    """Whether `hvd.elastic.run` runs with states of which none has the compression."""
    listeners = notification_manager._listeners
    states = [each for each in listeners if isinstance(each, horovod_state.TorchState)]
    handlers = [handler for each in states for handler in each._handlers.values()]
    return bool(states) and all(handler.value is not compression for handler in handlers)
