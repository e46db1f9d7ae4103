"""One compression's part in a framework's world: connection, agreement, plan and scale."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from hvd_sparse.adapter.binding import Parameters
from hvd_sparse.adapter.divergence import Divergence
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from hvd_sparse.adapter.handover import Handover
from hvd_sparse.adapter.levels import Hierarchical, agree_on_levels, check_hierarchical
from hvd_sparse.adapter.planning import Planning
from hvd_sparse.checks import check_options, check_timeout, choice, count, option, optional
from hvd_sparse.cores import bind
from hvd_sparse.engine import Assignment, Engine, TensorSpec
from hvd_sparse.engine.checkpoint import Gather
from hvd_sparse.errors import TransportError, TransportTimeout, logger, warn
from hvd_sparse.hosts import Slot
from hvd_sparse.leaving import PROCESS_END, Leaving
from hvd_sparse.planner import Planner, World, planner_of
from hvd_sparse.transports import Transport
from hvd_sparse.transports.connect import (
    TRANSPORT_NAMES,
    Bootstrap,
    HorovodBootstrap,
    create_transport,
)
from hvd_sparse.transports.transport import gather_json, started
from hvd_sparse.transports.waiting import HorovodWait, outcome_of

T = TypeVar("T")


class Framework(Protocol):
    """Who starts the ranks and reduces what is dense: Horovod, or torch.distributed."""

    def bootstrap(self, group: Any) -> Bootstrap:
        """The ranks of a process set or a process group; None: all there are."""
        ...

    def world(self) -> object:
        """An object that is another one whenever the framework has been started anew."""
        ...

    def slot(self, timeout_s: float) -> Slot:
        """Where this rank is."""
        ...

    @property
    def backend(self) -> str:
        """What reduces dense tensors."""
        ...

    def allreduce_of(self, group: Any) -> Callable[[Tensor], object]:
        """A dense allreduce over a group, in place, under names of its own."""
        ...

    def failures(self) -> type[Exception]:
        """What its own operations fail by, without a word of which rank is gone."""
        ...

    def error(self, error: TransportError) -> Exception:
        """What a script that uses the framework recovers from, where a peer is lost."""
        ...


class Horovod:
    """Horovod, as its own scripts start it."""

    backend = "horovod"

    def bootstrap(self, group: Any) -> HorovodBootstrap:
        return HorovodBootstrap(group)

    def world(self) -> object:
        return PROCESS_END.life

    def slot(self, timeout_s: float) -> Slot:
        import horovod.torch as hvd

        return Slot(hvd.local_rank(), hvd.local_size(), hvd.cross_rank())

    def allreduce_of(self, group: Any) -> Callable[[Tensor], object]:
        import horovod.torch as hvd

        def allreduce(tensor: Tensor) -> object:
            name = f"hvd_sparse.planner.{tensor.numel()}"
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=group)
            return outcome_of(handle)

        return allreduce

    def failures(self) -> type[Exception]:
        from horovod.common.exceptions import HorovodInternalError

        failures: type[Exception] = HorovodInternalError
        return failures

    def error(self, error: TransportError) -> Exception:
        return self.failures()(f"hvd_sparse: {error}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How the job runs: what a constructor takes beside its method's options, but for `record`."""

    transport: str = option(
        "auto",
        '"auto", "gloo", "mpi" or "nccl"; the environment variable HVD_SPARSE_TRANSPORT takes the '
        'place of "auto".',
        choice(TRANSPORT_NAMES),
    )
    hierarchical: Hierarchical = option(
        False,
        "True: workers of a host sum their gradients densely in shared memory; each then exchanges "
        'one shard sparsely with its counterparts on other hosts. "auto": do so where all hosts '
        "have the same number of workers, more than one, and the cost model predicts a gain.",
        check_hierarchical,
    )
    dense_below: int = option(
        1024,
        "Tensors of fewer elements go through Horovod's own allreduce. So does float64.",
        count(0),
    )
    timeout_s: float = option(
        600.0,
        "Seconds of silence after which a worker counts as dead; also the limit for connecting. A "
        "worker that is alive is waited for, with a warning every `timeout_s`.",
        check_timeout,
    )
    busy_timeout_s: float | None = option(
        None,
        "Limit in seconds on the wait for a worker that is alive; None: ten times `timeout_s`.",
        optional(check_timeout),
    )

    def __post_init__(self) -> None:
        check_options(self)


class Session(Leaving):
    """Connects an engine to the other ranks, and again whenever they are started anew.

    Attributes:
        engine: Reduces what is compressed.
        run: How the job runs.
        framework: To be set before the first step where it is not Horovod.
        lock: Held while a step opens, and by what may not be called within one.
        embeddings: Reduces the gradients of sparse embeddings, or None.
        planning: The planner beside the training, where the engine's assignment is a planner's.
        arrivals: The tensors in the order in which their gradients came in the last meeting.
        divergence: Compares the ranks' weights, now and then.
        waiting: Entered while this rank waits for Horovod, and its peers for nothing from it.
        handing: Prepares the hand-over of momenta to another assignment.
    """

    def __init__(self, engine: Engine, run: RunOptions) -> None:
        self.framework: Framework = Horovod()
        self.lock = threading.RLock()
        self.embeddings: EmbeddingExchange | None = None
        self.planning: Planning | None = None
        self.arrivals: list[str] = []
        self.waiting = HorovodWait()
        self.handing: Callable[[Assignment], Handover] = lambda after: Handover(
            (), engine, after, (), 0
        )
        self.engine, self.run = engine, run
        self.divergence = Divergence(())
        self._must_agree = self._compares = False
        self._connecting = False
        self._world: object | None = None
        self._slot: Slot
        self._group: Any = None
        self._parameters: Parameters
        self._transport: Transport

    def is_current(self) -> bool:
        """Whether the world is still the one that the transport was built beside."""
        return self._world is not None and self._world is self.framework.world()

    def connect(
        self,
        group: Any,
        updated: Iterable[Parameter],
        parameters: Parameters,
        device: torch.device | None,
    ) -> None:
        """Join the world that the framework is in; all ranks of a group do so together.

        Args:
            group: A process set or a process group: the world.
            updated: What the script trains.
            parameters: Those that have names; what is trained is among them.
            device: Where the gradients are that the engine exchanges; None where there are none.

        Raises:
            ConfigError: There is no world, or ranks want transports that cannot be.
            PlanError: Ranks have different assignments.
            HorovodInternalError: The ranks could not be connected.
        """
        run = self.run
        self._connecting = True
        PROCESS_END.add(self)
        with self.errors():
            world, self._group = self.framework.bootstrap(group), group

            def connected(at: torch.device | None) -> Transport:
                return create_transport(
                    *(run.transport, world, run.timeout_s, at), busy_timeout_s=run.busy_timeout_s
                )

            self._slot = self.framework.slot(run.timeout_s)
            bind(self._slot.local_rank, self._slot.local_size)  # before there are more threads
            self._transport = connected(device)
            self.waiting = self._transport.waiting
            self.engine.connect(self._transport)
            if self.embeddings is not None:
                self.embeddings.connect(connected(None))
            self._parameters = parameters
            self._agree()
        trained = set(updated)
        self.divergence = Divergence((name, p) for name, p in parameters if p in trained)
        self._connecting = False
        self._world = self.framework.world()
        logger.info("rank %d of %d uses %s", world.rank, world.size, self._transport.name)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A lost peer is an error that scripts of the framework recover from."""
        try:
            yield
        except TransportError as error:
            raise self.framework.error(error) from error

    def reassign(self, assignment: Assignment) -> None:
        """Reduce by another assignment from the next step on; see `SparseCompressor.reassign`."""
        engine, planner = self.engine, planner_of(assignment)
        if planner is not None and self.is_current():
            engine.reassign(engine.assignment)  # what is planned is given up, as ever
            try:
                with self.errors():
                    self._agree(planner)  # which decides first: momenta go straight where it says
            except BaseException:
                engine.reassign(planner)  # for the next connection
                raise
            return
        handover = self.handing(assignment)
        engine.reassign(assignment)
        if self.is_current():
            with self.errors():
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
        self._compares = self.divergence.begin_step()
        reviews = self.planning is not None and self.planning.begin_step()
        return self._must_agree or self._compares or reviews

    def meet(self) -> None:
        """Agree on what is due: on the plan, and on whether the ranks' weights are alike."""
        with self.errors():
            if self._must_agree:
                self._agree()
            elif self.planning is not None and self.planning.is_due:
                self.planning.review()
            if self._compares:
                self.divergence.compare(self._transport)

    def gather_objects(self, mine: object, channel: str) -> list[Any]:
        """Every rank's object, between steps, while the ranks are connected.

        Raises:
            HorovodInternalError: A peer is gone or did not answer; it is named.
        """
        transport = self._transport
        sent = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        with self.errors():
            messages = interruptibly(
                lambda: transport.allgather((sent,), channel=channel), transport.abort
            )
        return [pickle.loads(message.numpy().tobytes()) for message in messages]

    def gathering(self, group: Any, call: str) -> tuple[Bootstrap, Gather]:
        """The ranks of a group, or all there are, and how they gather objects."""
        world = self.framework.bootstrap(group)

        def gather(mine: Any) -> list[Any]:
            if self.is_current():  # it names who fails
                return self.gather_objects(mine, "checkpoint")
            with self.errors():
                try:
                    return world.allgather_object(mine, "hvd_sparse.checkpoint", self.run.timeout_s)
                except TransportTimeout:
                    raise TransportTimeout(
                        f"rank {world.rank} has waited {self.run.timeout_s:g} s in {call} for the "
                        f"other {world.size - 1} ranks: all of them must call it together"
                    ) from None

        return world, gather

    def raise_failure(self) -> None:
        """Raise what the engine has failed by in this world; return where it has not.

        Raises:
            HorovodInternalError: A peer is gone or did not answer.
            BaseException: Anything else.
        """
        error = self.engine.error
        if error is not None and self.is_current():
            with self.errors():
                raise error

    @override
    def leave(self, error: BaseException | None) -> bool:
        del error
        return self._connecting  # the engine and the transports leave by themselves

    def close(self) -> None:
        """Stop the background threads and close the connections; `connect` opens them again."""
        self.engine.disconnect()
        if self.embeddings is not None:
            self.embeddings.disconnect()
        self._world = None

    def _agree(self, new: Planner | None = None) -> None:
        """Let a planner decide; check that all ranks have one assignment, and what levels.

        Args:
            new: A planner that the engine does not have yet; None: its own, if it has one.
        """
        self.planning, self._must_agree = None, False
        engine, specs = self.engine, self._parameters.sparse_specs()
        planner = new or planner_of(engine.assignment)
        if planner is None:
            engine.agree()
        else:
            device = next((p.device for _, p in self._parameters), torch.device("cpu"))
            dense = self.framework.allreduce_of(self._group)
            world = World(self._transport, dense, device, self.framework.backend)
            ordered = self._specs_as_they_come()
            self.planning = Planning(planner, engine, self._change_to, ordered, world)
            before, planner.before = planner.before, None
            if before is not None and new is None:  # rank 0, or its state, had momenta so
                engine.assignment = before
            self._change_to(planner.current)
        engine.hosts = agree_on_levels(
            *(self.run.hierarchical, self.run.dense_below, self._slot),
            *(engine.assignment, specs, self._transport),
        )

    def _specs_as_they_come(self) -> list[TensorSpec]:
        """Tensors in the order of rank 0's gradients; what has not come yet, last of all."""
        came = gather_json(self._transport, self.arrivals, "arrivals")[0]
        places = {name: place for place, name in enumerate(came)}
        specs = reversed(self._parameters.sparse_specs())
        return sorted(specs, key=lambda spec: places.get(spec.name, len(places)))

    def _change_to(self, assignment: Assignment) -> None:
        """Reduce by a planner's assignment from the next step on; momenta change sides with it."""
        handover = self.handing(assignment)
        self.engine.reassign(assignment)
        self.engine.agree()
        self._carry_out(handover)

    def _carry_out(self, handover: Handover) -> None:
        """Hand momenta over, in rank 0's loss scale: one that has just joined does not know it."""
        unit = gather_json(self._transport, self.engine.unit, "unit")[0]
        handover.carry_out(unit, self._transport.world_size)


def interruptibly(call: Callable[[], T], abort: Callable[[BaseException], None]) -> T:
    """Make a call that waits in native code, where Python would not see Ctrl-C until it returns.

    Args:
        call: What to do, in a thread of its own.
        abort: Ends the call early, with the error by which this thread was interrupted.
    """
    outcome: Future[T] | None = None
    try:
        outcome = started("hvd_sparse.call", call)
        return outcome.result()
    except BaseException as error:
        if outcome is None or not outcome.done():
            abort(error)
        if outcome is not None:
            wait([outcome])
        raise
