"""One compression's part in Horovod's world: connection, agreement, plan and scale."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from typing_extensions import override

from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.divergence import Divergence
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from hvd_sparse.adapter.handover import Handover
from hvd_sparse.adapter.levels import Hierarchical, agree_on_levels
from hvd_sparse.adapter.planning import Planning, horovods_allreduce
from hvd_sparse.cores import bind
from hvd_sparse.engine import Assignment, Engine, TensorSpec
from hvd_sparse.engine.checkpoint import Gather
from hvd_sparse.errors import TransportError, TransportTimeout, warn
from hvd_sparse.hosts import Slot
from hvd_sparse.leaving import PROCESS_END, Leaving
from hvd_sparse.planner import Planner, World, planner_of
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from hvd_sparse.transports.transport import gather_json, start_thread

logger = logging.getLogger("hvd_sparse")
T = TypeVar("T")


class Session(Leaving):
    """Connects an engine to the other ranks, and again whenever Horovod is started anew.

    Args:
        engine: Reduces what is compressed.
        transport: Name of a transport, or "auto".
        timeout_s: Seconds of silence after which a peer counts as dead.
        busy_timeout_s: Seconds after which a peer that is alive is given up; None: 10 `timeout_s`.
        hierarchical: Whether to exchange on two levels, inside hosts and between them.

    Attributes:
        lock: Held while a step opens, and by what may not be called within one.
        embeddings: Reduces the gradients of sparse embeddings, or None.
        planning: The planner beside the training, where the engine's assignment is a planner's.
        arrivals: The tensors in the order in which their gradients came in the last meeting.
        handing: Prepares the hand-over of momenta to another assignment.
    """

    def __init__(
        self,
        engine: Engine,
        transport: str,
        timeout_s: float,
        busy_timeout_s: float | None = None,
        hierarchical: Hierarchical = False,
    ) -> None:
        self.lock = threading.RLock()
        self.embeddings: EmbeddingExchange | None = None
        self.planning: Planning | None = None
        self.arrivals: list[str] = []
        self.handing: Callable[[Assignment], Handover] = lambda after: Handover(
            None, engine, after, (), 0
        )
        self._engine = engine
        self._timeout_s, self._carrier = timeout_s, (transport, timeout_s, busy_timeout_s)
        self._hierarchical = hierarchical
        self._divergence: Divergence | None = None
        self._must_agree = self._compares = False
        self._connecting = False
        self._world: object | None = None
        self._mpi_ops: Any = None
        self._process_set: Any = None
        self._parameters: Parameters
        self._transport: Transport

    def is_current(self) -> bool:
        """Whether Horovod is still the one that the transport was built beside."""
        # A new hvd.init() makes a new map.
        return self._world is not None and self._world is self._mpi_ops._handle_map

    def connect(self, optimizer: Any, parameters: Parameters, device: torch.device | None) -> None:
        """Join the world that Horovod is in; all ranks of the process set do so together.

        Args:
            optimizer: Horovod's, whose process set is the world.
            parameters: Those that have names; the optimizer's are among them.
            device: Where the gradients are that the engine exchanges; None where there are none.

        Raises:
            ConfigError: Horovod is not initialised, or ranks want transports that cannot be.
            PlanError: Ranks have different assignments.
            HorovodInternalError: The ranks could not be connected.
        """
        from horovod.torch import mpi_ops

        world = HorovodBootstrap(optimizer.process_set)

        def connected(at: torch.device | None) -> Transport:
            name, timeout_s, busy_timeout_s = self._carrier
            return create_transport(name, world, timeout_s, at, busy_timeout_s=busy_timeout_s)

        self._connecting = True
        PROCESS_END.add(self)
        bind(mpi_ops.local_rank(), mpi_ops.local_size())  # before there are more threads
        with as_horovod_error():
            self._transport = connected(device)
            self._engine.connect(self._transport)
            if self.embeddings is not None:
                self.embeddings.connect(connected(None))
            self._process_set, self._parameters = world.process_set, parameters
            self._agree()
        updated = {p for group in optimizer.param_groups for p in group["params"]}
        self._divergence = Divergence((name, p) for name, p in parameters if p in updated)
        self._connecting = False
        self._mpi_ops, self._world = mpi_ops, mpi_ops._handle_map
        logger.info("rank %d of %d uses %s", world.rank, world.size, self._transport.name)

    def reassign(self, assignment: Assignment) -> None:
        """Reduce by another assignment from the next step on; see `SparseCompressor.reassign`."""
        engine, planner = self._engine, planner_of(assignment)
        if planner is not None and self.is_current():
            engine.reassign(engine.assignment)  # what is planned is given up, as ever
            try:
                with as_horovod_error():
                    self._agree(planner)  # which decides first: momenta go straight where it says
            except BaseException:
                engine.reassign(planner)  # for the next connection
                raise
            return
        handover = self.handing(assignment)
        engine.reassign(assignment)
        if self.is_current():
            with as_horovod_error():
                self._agree()
                self._carry_out(handover)
        elif handover.moves and planner is None:  # the next step's connection agrees
            handover.give_up()
            warn(
                f"the momentum of {', '.join(handover.moves)} begins anew: reassign() was called "
                "while no rank was connected"
            )

    def agree_again(self) -> None:
        """Let the planner decide anew in the next step, since a state was loaded, on all ranks."""
        self._must_agree = True

    def begin_step(self) -> bool:
        """Count a step; returns whether the ranks have to meet in it. The same on all ranks."""
        compares = self._divergence is not None and self._divergence.begin_step()
        reviews = self.planning is not None and self.planning.begin_step()
        self._compares = compares
        return self._must_agree or compares or reviews

    def meet(self) -> None:
        """Agree on what is due: on the plan, and on whether the ranks' weights are alike."""
        with as_horovod_error():
            if self._must_agree:
                self._agree()
            elif self.planning is not None and self.planning.is_due:
                self.planning.review()
            if self._compares and self._divergence is not None:
                self._divergence.compare(self._transport)

    def gather_objects(self, mine: object, channel: str) -> list[Any]:
        """Every rank's object, between steps, while the ranks are connected.

        Raises:
            HorovodInternalError: A peer is gone or did not answer; it is named.
        """
        transport = self._transport
        sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        with as_horovod_error():
            messages = interruptibly(
                lambda: transport.allgather((sent,), channel=channel), transport.abort
            )
        return [pickle.loads(message.numpy().tobytes()) for message in messages]

    def gathering(self, process_set: Any, call: str) -> tuple[HorovodBootstrap, Gather]:
        """The ranks of a process set, or all of Horovod's, and how they gather objects."""
        world = HorovodBootstrap(process_set)

        def gather(mine: Any) -> list[Any]:
            if self.is_current():  # it names who fails
                return self.gather_objects(mine, "checkpoint")
            with as_horovod_error():
                try:
                    return world.allgather_object(mine, "hvd_sparse.checkpoint", self._timeout_s)
                except TransportTimeout:
                    raise TransportTimeout(
                        f"rank {world.rank} has waited {self._timeout_s:g} s in {call} for the "
                        f"other {world.size - 1} ranks: all of them must call it together"
                    ) from None

        return world, gather

    def raise_failure(self) -> None:
        """Raise what the engine has failed by in this world; return where it has not.

        Raises:
            HorovodInternalError: A peer is gone or did not answer.
            BaseException: Anything else.
        """
        error = self._engine.error
        if error is not None and self.is_current():
            with as_horovod_error():
                raise error

    @override
    def leave(self, error: BaseException | None) -> bool:
        del error
        return self._connecting  # the engine and the transports leave by themselves

    def close(self) -> None:
        """Stop the background threads and close the connections; `connect` opens them again."""
        self._engine.disconnect()
        if self.embeddings is not None:
            self.embeddings.disconnect()
        self._world = None

    def _agree(self, new: Planner | None = None) -> None:
        """Let a planner decide; check that all ranks have one assignment, and what levels.

        Args:
            new: A planner that the engine does not have yet; None: its own, if it has one.
        """
        import horovod.torch as hvd

        self.planning, self._must_agree = None, False
        engine, specs = self._engine, self._parameters.sparse_specs()
        planner = new or planner_of(engine.assignment)
        if planner is None:
            engine.agree()
        else:
            device = next((p.device for _, p in self._parameters), torch.device("cpu"))
            world = World(self._transport, horovods_allreduce(self._process_set), device)
            ordered = self._specs_as_they_come()
            self.planning = Planning(planner, engine, self._change_to, ordered, world)
            before, planner.before = planner.before, None
            if before is not None and new is None:  # rank 0, or its state, had momenta so
                engine.assignment = before
            self._change_to(planner.current)
        slot = Slot(hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
        engine.hosts = agree_on_levels(
            self._hierarchical, slot, engine.assignment, specs, self._transport
        )

    def _specs_as_they_come(self) -> list[TensorSpec]:
        """Tensors in the order of rank 0's gradients; what has not come yet, last of all."""
        came = gather_json(self._transport, self.arrivals, "arrivals")[0]
        places = {name: place for place, name in enumerate(came)}
        specs = reversed(self._parameters.sparse_specs())
        return sorted(specs, key=lambda spec: places.get(spec.name, len(places)))

    def _change_to(self, assignment: Assignment) -> None:
        """Reduce by a planner's assignment from the next step on; momenta change sides with it."""
        engine = self._engine
        if engine.assignment.description == assignment.description:
            engine.assignment = assignment
            engine.agree()
            return
        handover = self.handing(assignment)
        engine.reassign(assignment)
        engine.agree()
        self._carry_out(handover)

    def _carry_out(self, handover: Handover) -> None:
        """Hand momenta over, in rank 0's loss scale: one that has just joined does not know it."""
        unit = torch.tensor([self._engine.unit], dtype=torch.float64, device="cpu")
        sent = self._transport.broadcast((unit,), 0, channel="unit")
        handover.carry_out(float(sent.view(torch.float64)), self._transport.world_size)


def interruptibly(call: Callable[[], T], abort: Callable[[BaseException], None]) -> T:
    """Make a call that waits in native code, where Python would not see Ctrl-C until it returns.

    Args:
        call: What to do, in a thread of its own.
        abort: Ends the call early, with the error by which this thread was interrupted.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        thread = start_thread("hvd_sparse.call", run)
    except TransportError as error:
        abort(error)
        raise
    try:
        return outcome.result()
    except BaseException as error:
        if not outcome.done():
            abort(error)
        raise
    finally:
        thread.join()


@contextmanager
def as_horovod_error() -> Iterator[None]:
    """A lost peer is an error that `hvd.elastic` recovers from."""
    try:
        yield
    except TransportError as error:
        raise horovod_error(error) from error


def horovod_error(error: TransportError) -> Exception:
    """The same error as Horovod's own, which `hvd.elastic` recovers from."""
    from horovod.common.exceptions import HorovodInternalError

    internal_error: Exception = HorovodInternalError(f"hvd_sparse: {error}")
    return internal_error
