"""The way in and out for torch's DistributedDataParallel: what is known of it stands here.

DDP hands each bucket of gradients to a hook, in one order on all ranks, and waits for the hooks'
futures at the end of the backward pass. Within a pass:
  1. A bucket's gradients go to the engine, which exchanges them beside the rest of the pass.
  2. Once all of the pass has run, the ranks meet where that is due, and wait for all results.
  3. Once DDP has put them into their places, it is known which parameters got theirs: one that no
     rank has used keeps its gradient, and what was sent of it goes back.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hvd_sparse.adapter.binding import Entry, Parameters
from hvd_sparse.adapter.entrance import LOOK_S, Entrance, by_kind, is_part, is_shared
from hvd_sparse.adapter.fate import Fates
from hvd_sparse.adapter.handover import has_memory
from hvd_sparse.adapter.session import Session
from hvd_sparse.engine import Assignment
from hvd_sparse.errors import ConfigError, TransportError, UnsupportedError
from hvd_sparse.hosts import Slot
from hvd_sparse.leaving import keep_forever
from hvd_sparse.optim import optimizer_of, parameters_of
from hvd_sparse.transports.connect import not_all_came
from hvd_sparse.transports.meeting import describe_host
from hvd_sparse.transports.waiting import SPIN_S, Pauses

AGENT_VARIABLE = "GROUP_RANK"
"""Where torchrun says which of its agents has started a rank: each is a host."""

RESTART_VARIABLE, OUTLIVES_VARIABLE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"
"""Where it says how often it has started the ranks anew, as each agent counts it, and whether its
store outlives them: another one needs no number."""

IDLE_STEPS = 10
"""After so many passes that no step has applied, a warning asks whether anybody will."""


class GroupBootstrap:
    """The ranks of a process group, which meet in its store.

    Raises:
        ConfigError: There is no process group, this process is not in it, or it has no store.
    """

    mpi_enabled = False

    def __init__(self, group: Any) -> None:
        if not dist.is_initialized():
            raise ConfigError("init_process_group() must come before the first backward pass")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError(f"rank {dist.get_rank()} is not in the model's process group")
        self.ranks = list(range(self.size))
        world: Any = group or dist.group.WORLD
        store: Any = distributed_c10d._get_process_group_store(world)
        if store is None:
            raise ConfigError(f"the process group ({dist.get_backend(group)}) has no store")
        outlives = os.environ.get(OUTLIVES_VARIABLE) == "True"
        restart = os.environ.get(RESTART_VARIABLE, "0") if outlives else "0"
        self._store = distributed_c10d.PrefixStore(f"hvd_sparse/{restart}", store)

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        """Every rank's object, by rank; collective.

        Raises:
            TransportTimeout: Not all ranks came in time.
            TransportError: The store is gone, with the process that has served it.
        """
        keys = [f"{name}/{self.rank}"]
        try:
            # A store keeps what it was told, and has what others have told it before.
            count = self._store.add(f"{name}/{self.rank}", 1)
            keys = [f"{name}/{count}/{rank}" for rank in range(self.size)]
            self._store.set(keys[self.rank], pickle.dumps(obj))  # type: ignore[arg-type]
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return [pickle.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            try:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            except RuntimeError:
                raise TransportError(
                    f"the process group's store cannot be reached: {error}"
                ) from None
            raise not_all_came(self, name, timeout_s, missing) from None


class Distributed:
    """torch.distributed, as a script for DDP starts it."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def backend(self) -> str:
        return dist.get_backend(self._group)

    def bootstrap(self, group: Any) -> GroupBootstrap:
        return GroupBootstrap(group or self._group)

    def world(self) -> object:
        return dist.group.WORLD if dist.is_initialized() else None

    def slot(self, timeout_s: float) -> Slot:
        world = self.bootstrap(self._group)
        host = f"{describe_host().host}/{os.environ.get(AGENT_VARIABLE, '')}"
        hosts = world.allgather_object(host, "slot", timeout_s)
        number = list(dict.fromkeys(hosts)).index(host)
        return Slot(hosts[: world.rank].count(host), hosts.count(host), number)

    def allreduce_of(self, group: Any) -> Callable[[Tensor], object]:
        return lambda tensor: dist.all_reduce(tensor, group=group)

    def failures(self) -> type[Exception]:
        return RuntimeError

    def error(self, error: TransportError) -> Exception:
        return error


class Dense(NamedTuple):
    """What the process group reduces: `work` ends it, in place; `parts` lie in `tensor`."""

    work: Any
    tensor: Tensor
    parts: list[tuple[Entry, Tensor]]


class DdpDoor(Entrance):
    """One model's gradients on their way to the engine or to its process group, and back."""

    def __init__(
        self, model: DistributedDataParallel, parameters: Parameters, session: Session
    ) -> None:
        named = model.module.named_parameters()
        self._entries = {
            id(p): Entry(p, n, None if n in model.parameters_to_ignore else parameters.name_of(p))
            for n, p in named
        }
        fates = Fates(self._entries, session.engine.corrects_momentum, "backward()")
        self._refuse_other_wrappers(session.engine.assignment, session.run.dense_below)
        mine = self._entries.values()
        super().__init__(parameters, session, fates, mine, model)
        self._group, self._finds_unused = model.process_group, model.find_unused_parameters
        self._late_buckets = len(model._get_ddp_logging_data()["bucket_sizes"].split(","))
        self._futures: list[tuple[Future[Any], Tensor]] = []
        self._dense: list[tuple[Entry, Tensor]] = []
        self._before: list[tuple[Tensor | None, int]] = []
        self._results: dict[Entry, Tensor] = {}

    @override
    def refuse(self, assignment: Assignment) -> None:
        super().refuse(assignment)
        self._refuse_other_wrappers(assignment, self._dense_below)

    def _others(self) -> list[DdpDoor]:
        """The doors of other wrappers."""
        doors = (door() for door in Entrance.doors)
        return [d for d in doors if d is not self and isinstance(d, DdpDoor) and d.serves_any]

    def _refuse_other_wrappers(self, assignment: Assignment, dense_below: int) -> None:
        for other in self._others():
            for key in self._entries.keys() & other._entries.keys():
                entry, both = self._entries[key], (assignment, other._engine.assignment)
                if any(has_memory(each, entry, dense_below) for each in both):
                    raise UnsupportedError(
                        f"{entry.label!r} has a compression by another wrapper, too, which is "
                        "still there: with momentum or preconditioning a parameter takes one alone"
                    )

    @override
    def _reduces(self, parameter: Parameter) -> bool:
        entry = self._entries.get(id(parameter))  # another wrapper may reduce it in other passes
        return entry is not None and entry.name is not None

    @property
    @override
    def optimizer(self) -> Any:
        """The first that has stepped; None before, and once it is gone."""
        return next(iter(self.optimizers), None)

    @property
    @override
    def group(self) -> Any:
        return self._group

    @override
    def scale(self) -> float:
        """DDP gives averages."""
        return 1.0 / dist.get_world_size(self._group)

    # -- in ----------------------------------------------------------------------------------------

    def take(self, bucket: Any) -> Future[Tensor]:
        """DDP's communication hook: take a bucket; all are reduced at the end of the pass."""
        buffer = bucket.buffer()
        devices = [buffer.device] if buffer.device.type != "cpu" else None
        future: Future[Tensor] = Future(devices=devices)
        # All buckets of a static graph's first pass come after it, and each is the first.
        comes_late = torch._C._current_autograd_node() is None
        with self._session.lock:
            if bucket.index() == 0 and not (comes_late and self._futures):
                self.give_up(None)  # a pass that has failed
                self._open_step()
            self._futures.append((future, buffer))
            parameters, gradients = bucket.parameters(), bucket.gradients()
            if buffer.is_sparse or parameters[0].is_complex():  # torch names half of a complex one
                parameters, gradients = parameters[:1], [buffer]
            else:
                gradients = list(map(laid_out, gradients, parameters))
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._hand_in(parameter, gradient)
        if not comes_late and bucket.is_last():
            Variable._execution_engine.queue_callback(torch.compiler.disable(self._end_pass))
        elif comes_late and len(self._futures) == self._late_buckets:
            self._end_pass()
        return future

    @override
    def _open_step(self) -> None:
        model = self._served()
        if model is not None and model._join_config.enable:
            raise UnsupportedError(
                "model.join() cannot be used: sparse gradients are averaged over all ranks"
            )
        self.fates.left_failed_step()
        self.fates.refuse_closures(reduces_before=False)
        if not self._met:  # a resumed optimizer has units, or momenta, before its first step
            known = {optimizer_of(entry.parameter) for entry in self._entries.values()}
            for optimizer in known - {None}:
                self._meet_optimizer(optimizer)
        super()._open_step()

    def _hand_in(self, parameter: Parameter, gradient: Tensor) -> None:
        entry = self._entries[id(parameter)]
        entry.gradient, own = gradient, parameter.grad
        self._handed.append(entry)
        self._before.append((own, 0 if own is None else own._version))
        if not self._holds_back:
            self._pass_on(entry, gradient)

    @override
    def _connect(self) -> None:
        self._warn_of_strangers(self._handed)
        trained = [entry.parameter for entry in self._handed]
        self._session.connect(self._group, trained, self._parameters, self._device())

    @override
    def _pass_on(self, entry: Entry, gradient: Tensor) -> None:
        if entry.parameter.is_complex():
            self._give_to_framework(entry, gradient)
        else:
            super()._pass_on(entry, gradient)

    @override
    def _give_to_framework(self, entry: Entry, gradient: Tensor) -> None:
        self._dense.append((entry, gradient))
        entry.reduced = lambda: gradient  # a sparse one is reduced in place

    # -- out ---------------------------------------------------------------------------------------

    def _end_pass(self) -> None:
        """The whole pass has run. DDP's own call at its end comes next, then the step's."""
        self._reduce()
        Variable._execution_engine.queue_callback(torch.compiler.disable(self._end_step))

    def _reduce(self) -> None:
        """All gradients are there: wait until they are reduced, and put them into the buckets."""
        session, engine = self._session, self._engine
        session.raise_failure()
        if self._holds_back:
            self._meet()
        with self._first_cause():
            engine.plan()
            if session.embeddings is not None:
                session.embeddings.launch()
            begun = self._begin_dense()
            try:
                while not engine.wait(LOOK_S):
                    session.raise_failure()
                results = self._engine_results()
                self._finish_dense(begun)
            except BaseException:
                keep_forever(self._group)  # its end would wait for what is under way
                raise
            shared = {key for other in self._others() for key in other._entries}
            for entry in self._handed:
                result = results[entry.name] if entry.reduced is None else entry.reduced()
                assert entry.gradient is not None
                if id(entry.parameter) not in shared and self._takes(entry, result):
                    self._results[entry] = result
                elif not result.is_sparse:
                    entry.gradient.copy_(result)
                elif result is not entry.gradient:  # a bucket of its own
                    self._futures = [
                        (future, result if buffer is entry.gradient else buffer)
                        for future, buffer in self._futures
                    ]
        for future, buffer in self._futures:
            future.set_result(buffer)

    def _takes(self, entry: Entry, result: Tensor) -> bool:
        """Whether a result can become `p.grad` once DDP has put there what is in the bucket."""
        own = entry.parameter.grad
        if own is None or entry.reduced is not None or self._finds_unused:  # it may leave those
            return False
        return own.stride() == result.stride() and not is_shared(own, 1)

    def serves(self, model: DistributedDataParallel) -> bool:
        """Whether this is the model's, and not that of which it is a copy."""
        return self._served() is model

    def _begin_dense(self) -> list[Dense]:
        """Begin to reduce what is dense: one tensor for each type, and each sparse tensor."""
        dense, self._dense = self._dense, []
        whole: list[tuple[Tensor, list[tuple[Entry, Tensor]]]]
        whole = [(gradient, []) for _, gradient in dense if gradient.is_sparse]
        flat = [(entry, gradient) for entry, gradient in dense if not gradient.is_sparse]
        sent = [(entry, g.float() if g.itemsize == 2 else g) for entry, g in flat]  # for the sum
        whole += [(torch.cat([g.flatten() for _, g in each]), each) for each in by_kind(sent)]
        return [
            Dense(dist.all_reduce(tensor, group=self._group, async_op=True), tensor, parts)
            for tensor, parts in whole
        ]

    def _finish_dense(self, begun: Iterable[Dense]) -> None:
        pauses = Pauses(SPIN_S)
        for work, tensor, parts in begun:
            while not work.is_completed():
                if pauses.pause():
                    self._session.raise_failure()
            work.wait()
            tensor.mul_(self.scale())
            values = tensor.split([gradient.numel() for _, gradient in parts]) if parts else ()
            for (entry, gradient), value in zip(parts, values, strict=True):
                entry.reduced = partial(value.view, gradient.shape)
                if entry.is_followed and entry.name is not None:
                    self._engine.residuals.flushed(entry.name)

    def _end_step(self) -> None:
        """DDP has put the reduced gradients into their places, or has left what was there."""
        followed = [
            (entry, self._has_its_result(entry, *before))
            for entry, before in zip(self._handed, self._before, strict=True)
            if entry.is_followed
        ]
        for entry, has in followed:
            if has and entry in self._results:
                entry.lend(self._results[entry])
        self.fates.give(entry for entry, has in followed if has)
        self._warn_of_idle([e for e, has in followed if has and e.idle_steps == IDLE_STEPS])
        self.fates.drop(entry for entry, has in followed if not has)
        if self._session.planning is not None:
            self._session.planning.returned()
        self._close_step()
        self._engine.let_go()

    def _warn_of_idle(self, idle: Sequence[Entry]) -> None:
        """Some have been reduced several times, and no step has applied that."""
        met = self.optimizers if idle else ()
        held = {id(p) for optimizer in met for p in parameters_of(optimizer)}
        self._warn_of_unheld([e for e in idle if held and id(e.parameter) not in held])

    def _has_its_result(self, entry: Entry, before: Tensor | None, version: int) -> bool:
        own, result = entry.parameter.grad, entry.gradient
        if own is None or result is None:
            return False
        if own is not before:
            return True
        if own.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
            return True
        is_unsure = self._finds_unused and is_part(own)  # parts count each other's changes
        return own._version != version and (not is_unsure or torch.equal(own, result))

    @override
    def _open_nothing(self) -> None:
        super()._open_nothing()
        self._futures, self._dense, self._before, self._results = [], [], [], {}


def laid_out(gradient: Tensor, parameter: Parameter) -> Tensor:
    """A bucket's gradient with the strides of its parameter, by which DDP has filled the bucket."""
    strides = parameter.stride()
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != strides:
        return gradient  # DDP lays out what overlaps, or has gaps, by its shape
    return gradient.as_strided(gradient.shape, strides, gradient.storage_offset())
