"""A compression: Horovod's `Compressor` interface, and its user's, in front of an engine."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.adapter.binding import Parameters, caller_of, named_pairs
from hvd_sparse.adapter.ddp_door import DdpDoor, Distributed
from hvd_sparse.adapter.door import Door
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from hvd_sparse.adapter.handover import Handover, left_dense
from hvd_sparse.adapter.refusals import refuse_operation
from hvd_sparse.adapter.session import Horovod, RunOptions, Session
from hvd_sparse.checks import check_above_zero, check_choice
from hvd_sparse.engine import Assignment, Engine, Observer, Stats, WithDense
from hvd_sparse.engine.checkpoint import Gather, load_checkpoint, save_checkpoint
from hvd_sparse.errors import ConfigError, UnsupportedError, warn
from hvd_sparse.functional.communicator import ALGORITHMS
from hvd_sparse.methods import METHODS
from hvd_sparse.optim import exponents_of
from hvd_sparse.planner import planner_of
from hvd_sparse.transports.connect import Bootstrap

REFUSED = ("skip_all_reduce_unused_params", "_use_python_reducer", "_delay_all_reduce_params")
"""By these, models reduce gradients beside their hook, or do not wait for it."""
COPIED = ("method", "observer", "_run")
"""The attributes of a copy, which begins without a residual."""


class SparseCompressor:
    """What `hvd.DistributedOptimizer(compression=…)` is given; made by `hvd_sparse.Compression`.

    It serves one optimizer. The gradients that it hands back are views of buffers that it writes
    again in the next step, once the next gradients have come.

    Args:
        named_parameters: The optimizer's parameters by name, or None to read them from it.
        method: How to compress and exchange: a `Method` for all tensors, or an `Assignment`.
        run: How the job runs.
        observer: Is told of plans and steps, or None.
    """

    method: Assignment
    observer: Observer | None

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]] | None,
        method: Assignment,
        run: RunOptions,
        observer: Observer | None,
    ) -> None:
        vars(self).update(method=method, observer=observer)
        self._run = run
        self._parameters = None
        if named_parameters is not None:
            pairs = named_pairs(named_parameters)
            self._parameters = Parameters([(name, p) for name, p in pairs if p.requires_grad])
        self._start()

    def _start(self) -> None:
        self._engine = Engine(self._whole(self.method), self.observer)
        self._session = Session(self._engine, self._run)
        self._door: Door | DdpDoor | None = None
        self._loaded_units: dict[str, float | None] = {"unit": None, "scale": None}
        self._loaded_strictly: bool | None = None
        self._serve_elastic_states()
        self._warn_where_alone()

    def _warn_where_alone(self) -> None:
        """Horovod hands one worker's gradients to nobody."""
        clips = isinstance(self._engine.assignment, WithDense)
        is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"  # it then takes them all the same
        if clips and not is_elastic and is_horovods() and sys.modules["horovod.torch"].size() == 1:
            warn("one worker alone exchanges nothing: clip_norm does not clip; use clip_grad_norm_")

    def _serve_elastic_states(self) -> None:
        """Once a script has imported Horovod: without it, there are none."""
        if sys.modules.get("horovod.torch.elastic") is not None:
            from hvd_sparse.adapter.elastic import register

            register(SparseCompressor)

    # -- Horovod's interface -----------------------------------------------------------------------

    def compress(self, tensor: Tensor) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """Take over from Horovod's own reduction, at an optimizer's first gradient.

        From then on its door is called instead. A tensor of any other caller is left as it is.

        Args:
            tensor: A gradient of any shape, or any other tensor.

        Returns:
            What Horovod is to reduce, and what `decompress` needs to know.
        """
        optimizer, parameter, synchronizes, groups = caller_of(self)
        if optimizer is None or parameter is None:
            warn(
                "compress() was called by another than hvd.DistributedOptimizer(compression=…) "
                "of this compression: its tensor is reduced densely"
            )
            return tensor, None
        with torch.inference_mode(mode=False):  # in which what is made could not change later
            with self._session.lock:  # backward passes may run in several threads
                is_new = self._bound() is not optimizer
                door = self._bind(optimizer)
                group = optimizer._p_to_group[parameter] if groups else ()
                result = door.first(parameter, group, is_new=is_new)
            if synchronizes:
                door.meet_early()
        return result

    def decompress(self, tensor: Tensor, ctx: Callable[[], Tensor] | None) -> Tensor:
        """Give the reduced gradient back.

        Args:
            tensor: What Horovod made of the tensor that `compress` returned.
            ctx: The context that `compress` returned; None where the tensor is the result.

        Raises:
            UnsupportedError: The optimizer's reduction is no sum or average over all ranks.
            HorovodInternalError: A peer is gone; `hvd.elastic` recovers from it.
            PlanError: Ranks have different gradients.
        """
        if ctx is not None:
            with torch.inference_mode(mode=False):
                return ctx()
        if self._door is None:  # Horovod itself takes sparse gradients, and asks nobody
            optimizer = caller_of(self).optimizer
            if optimizer is not None:
                self._bind(optimizer)
        return tensor

    # -- for the user ------------------------------------------------------------------------------

    def exchange_embeddings(
        self, named_parameters: Iterable[tuple[str, Parameter]], *, algorithm: str = "auto"
    ) -> None:
        """Reduce the gradients of embeddings with `sparse=True` too, by `sparse_allreduce`.

        Otherwise Horovod gathers them, which grows with the number of ranks. Nothing is selected
        or rounded. To be called before the first backward pass.

        Args:
            named_parameters: As `model.named_parameters()`, the same on all ranks; those whose
                gradients are not sparse are left alone.
            algorithm: See `hvd_sparse.sparse_allreduce`.

        Raises:
            ConfigError: `algorithm` is unknown, or this was called before, or too late.
        """
        check_choice("algorithm", algorithm, ["auto", *ALGORITHMS])
        if self._bound() is not None or self._session.is_current():
            raise ConfigError("exchange_embeddings must be called before the first backward pass")
        if self._session.embeddings is not None:
            raise ConfigError("exchange_embeddings must be called once, got a second call")
        self._session.embeddings = EmbeddingExchange(named_parameters, algorithm)

    def stats(self) -> Stats:
        """What was selected, sent and waited for, per bucket and step: a snapshot.

        Its text is a short table, and `later.since(earlier)` is what happened between two of them.
        Any thread may call it at any time. A skipped step is counted once the next one has begun.
        """
        embeddings = self._session.embeddings
        sent = 0 if embeddings is None else embeddings.traffic.bytes_sent
        return replace(self._engine.stats(), dense=self._left_dense(), embedding_bytes=sent)

    def _left_dense(self) -> dict[str, list[str]]:
        named, assignment = self._parameters, self._engine.assignment
        assignment = getattr(assignment, "inner", assignment)  # of one that clips
        return {} if named is None else left_dense(named, assignment, self._run.dense_below)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and thresholds; every rank saves its own. Call between steps."""
        with self._session.lock:
            self._settle("state_dict()", between_steps=True)
            return self._state()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from what `state_dict()` of the same rank returned.

        All ranks load between the same two steps. What cannot be seen from one rank alone is
        compared in the next step.

        Args:
            state: What `state_dict()` returned.
            strict: Whether the state must be that of this rank in a world of this size, and of one
                step on all ranks, with residuals of the optimizer's parameters only. Otherwise
                residuals of other parameters are dropped, with a warning and a count in
                `stats().dropped_l1`; in a world of another size thresholds and regions are drawn
                anew, and what a rank held that is no more is lost (`load_checkpoint` keeps it).

        Raises:
            ConfigError: The state is not one that `state_dict()` makes, or does not belong here.
        """
        self._settle("load_state_dict()")
        self._load(state, strict=strict)

    def save_checkpoint(self, path: str | os.PathLike[str], *, process_set: Any = None) -> None:
        """Write all ranks' states into a folder; all ranks call this between the same two steps.

        Until everything is written, the folder's earlier checkpoint is whole. On hosts that share
        no file system every host gets the files of its own ranks and a manifest, which can be
        loaded by the same ranks on the same hosts only.

        Args:
            path: A folder, which is made where there is none.
            process_set: The optimizer's, or the model's process group, where it has one; needed
                before the first step only.

        Raises:
            CheckpointError: On every rank, where it could not be written on any.
        """
        self._settle("save_checkpoint()", between_steps=True)
        self._engine.check_between_steps("save_checkpoint()")
        world, gather = self._gathering(process_set, "save_checkpoint()")
        save_checkpoint(path, self._state, world.rank, world.size, gather)

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, missing: str = "refuse", process_set: Any = None
    ) -> None:
        """Continue from `save_checkpoint`; all ranks call this between the same two steps.

        In a world of another size each residual and momentum of old rank i is added to those of
        new rank i % P, so that nothing of a gradient is lost; thresholds and regions are drawn
        anew. This takes a file system that all hosts share.

        Args:
            path: The folder.
            missing: "refuse" files that are damaged, missing or not of this checkpoint, and
                residuals of parameters that the optimizer has not; or "drop" them, with a warning
                and a count in `stats().dropped_l1`.
            process_set: As in `save_checkpoint`.

        Raises:
            CheckpointError: On every rank, where any of them cannot load.
        """
        self._settle("load_checkpoint()", between_steps=True)
        self._engine.check_between_steps("load_checkpoint()")
        world, gather = self._gathering(process_set, "load_checkpoint()")
        loaded = load_checkpoint(path, world.rank, world.size, gather, missing, self._shapes())
        self._engine.load_state_dict(loaded.state, strict=False)
        if loaded.dropped:
            self._engine.count_dropped(loaded.dropped_l1, "; ".join(loaded.dropped))
        self._continue_from(loaded.state, strict=missing == "refuse")

    def _state(self) -> dict[str, Any]:
        planner = planner_of(self._engine.assignment)
        plan = None if planner is None else planner.state_dict()
        return {**self._engine.state_dict(), **self._units(), "planner": plan}

    def _load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        self._engine.load_state_dict(state, strict=strict, shapes=self._shapes())
        self._continue_from(state, strict=strict)

    def _continue_from(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """The engine has loaded its part of a state; without parameters it is not checked yet."""
        self._loaded_strictly = strict if self._parameters is None else None
        self._take_units(state.get("unit"), state.get("scale"))
        planner, plan = planner_of(self._engine.assignment), state.get("planner")
        if planner is not None:
            if plan is not None:
                planner.load_state_dict(plan)
            self._session.agree_again()  # momenta are where the state's plan had them
        if self._door is not None:
            self._door.forgives = True  # it is not to be dropped with the optimizer's

    def _shapes(self) -> dict[str, tuple[int, ...]] | None:
        named = self._parameters
        return None if named is None else {name: tuple(p.shape) for name, p in named}

    def _units(self) -> dict[str, float | None]:
        """What residuals are in units of: `unit` and `scale` of a state; None while not known."""
        if self._door is None:
            return self._loaded_units
        return {"unit": self._door.fates.unit, "scale": self._door.seen_scale}

    def _take_units(self, unit: float | None, scale: float | None) -> None:
        """What the scaler's and the world's differ by, the next step mends."""
        self._loaded_units = {"unit": unit, "scale": scale}
        if self._door is not None:
            self._door.seen_scale = scale
            self._door.fates.unit = unit or self._door.fates.unit

    def _bound(self) -> Any:
        """The optimizer that this serves; None before the first step, and once it is gone."""
        return None if self._door is None else self._door.optimizer

    def _gathering(self, group: Any, call: str) -> tuple[Bootstrap, Gather]:
        """The ranks of the optimizer or model, or of a given group before there is one."""
        if self._door is not None and self._bound() is not None:
            group = self._door.group
        elif self._door is None and dist.is_initialized() and not is_horovods():
            self._session.framework = Distributed(group)
        return self._session.gathering(group, call)

    def reassign(self, method: Assignment | SparseCompressor) -> None:
        """Compress otherwise from the next step on, without losing a residual.

        All ranks call this between the same two steps. A tensor that was sparse and now is dense
        has its residual added to its next gradients, at most half a gradient's norm in a step.
        Momentum goes along, between the compression and `MomentumCorrectedSGD`; not while no rank
        is connected, as after `close()` or in a callback of an elastic reset.

        Args:
            method: A `Method` for all tensors, or an `Assignment`; or another compression, whose
                `method` is taken. `dense_below` and all that is no method's stay what they are.

        Raises:
            PlanError: On every rank, where they want different ones.
        """
        method = method.method if isinstance(method, SparseCompressor) else method
        assignment = self._whole(method)
        if self._door is not None:
            self._door.refuse(assignment)
        self._settle("reassign()")
        vars(self)["method"] = method
        self._session.reassign(assignment)

    def _whole(self, method: Assignment) -> Assignment:
        """As the engine gets it: with dense tensors, too, where gradients are clipped."""
        clip_norm: float | None = getattr(method, "clip_norm", None)  # a user's may not know of it
        if clip_norm is None:
            return method
        dense = METHODS["topk"](density=1.0, clip_norm=clip_norm).make()
        return WithDense(method, dense, self._run.dense_below)

    def rescale(self, factor: float) -> None:
        """Tell that the loss is multiplied by another scale from the next backward pass on.

        For loss scalers other than `torch.amp.GradScaler`, which is followed without a call.
        Residuals and momenta are in units of the gradients. All ranks call this between the same
        two steps, also before the first one where a scaler begins with another scale than 1.

        Args:
            factor: The new scale divided by the one before, above 0.

        Raises:
            ConfigError: It is no finite number above 0, or a step is under way.
        """
        check_above_zero("factor", factor)
        self._settle("rescale()", between_steps=True)
        self._engine.rescale(factor)
        units = self._units()
        self._take_units((units["unit"] or 1.0) * float(factor), units["scale"])
        if self._door is not None:
            self._door.fates.scaler = None  # a new one may come

    def forget(self, names: Iterable[str]) -> float:
        """Let go of what waits to be sent of some parameters, and of their momentum here.

        All ranks call this between the same two steps, with the same names. It is for layers that
        were replaced or set anew: the gradients in their residuals are of other weights. What the
        optimizer holds stays.

        Args:
            names: Of parameters, as in `named_parameters`.

        Returns:
            L1 norm of what this rank let go of; `stats().dropped_l1` counts it.

        Raises:
            ConfigError: There is no such parameter, as far as they are known; or a step is under
                way.
        """
        names = [names] if isinstance(names, str) else list(names)
        known = names if self._parameters is None else self._parameters.known_as(names)
        self._settle("forget()", between_steps=True)
        return self._engine.forget(known)

    def applied(self) -> None:
        """Tell that this script has applied by hand what `optimizer.synchronize()` gave back.

        For scripts that update weights without any optimizer's `step`, after each update. Without
        this call such gradients count as dropped, and are sent once more.
        """
        if self._door is not None:
            self._door.fates.applied()
            for rewinds in self._door.rewinds:
                rewinds.stepped()

    def give_up_step(self) -> None:
        """Let go of a step, after which a state is loaded; see `TorchState`."""
        self._settle("load_state_dict()")
        if self._door is not None:
            self._door.give_up()
            self._door.fates.forget_taken_back()

    def close(self) -> None:
        """Stop the background threads and close the connections; a later step opens them again."""
        self._settle("close()")
        self._session.close()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise ConfigError(
                f"a compression has no attribute {name!r} to set: make another one, and give its "
                "method to compression.reassign()"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without its engine: a copy reads its parameters from the optimizer it serves."""
        if self._engine.residuals.holds_any:
            warn(
                "a copy of a compression has none of its residuals: save state_dict() or "
                "save_checkpoint() beside it"
            )
        return {name: getattr(self, name) for name in COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parameters = None
        self._start()

    def _settle(self, call: str, *, between_steps: bool = False) -> None:
        """See what became of the last step: its results were applied, or it never happened.

        Args:
            call: The user's, which is to name where a step comes after all.
            between_steps: Whether it may not be made within a step.
        """
        if self._door is not None:
            if between_steps:
                self._door.check_between_steps(call)
            self._door.settle(call)

    def _bind(self, optimizer: Any) -> Door:
        """The door of an optimizer, which is made when its first gradient comes.

        Raises:
            ConfigError: The compression serves another optimizer.
            UnsupportedError: Its gradients cannot be exchanged sparsely.
        """
        if isinstance(self._door, Door) and self._door.optimizer is optimizer:
            return self._door
        if isinstance(self._door, DdpDoor) or self._bound() is not None:
            raise ConfigError(
                "a compression serves one optimizer, but a second hvd.DistributedOptimizer uses "
                "this one: make one compression for each"
            )
        self._serve_elastic_states()
        import horovod.torch as hvd

        # Horovod has another optimizer class for Adasum, without an `op`.
        refuse_operation(hvd.Adasum if hasattr(optimizer, "_starting_models") else optimizer.op)
        if self._session.embeddings is not None and getattr(optimizer, "sparse_as_dense", False):
            raise ConfigError(
                "sparse_as_dense must be False with exchange_embeddings, got True: leave one of "
                "them out"
            )
        names = optimizer._parameter_names
        named = [(name, p) for p, name in names.items() if p in optimizer._requires_update]
        parameters = self._take_names(named, f"the optimizer's {len(named)} parameters")
        self._leave_door(Horovod())
        door = Door(optimizer, parameters, self._session)
        self._open(door)
        return door

    def register(self, model: DistributedDataParallel) -> None:
        """Become the communication hook of a model; see `hvd_sparse.ddp.register`."""
        if isinstance(self._door, Door) or (self._door is not None and self._door.serves_any):
            raise ConfigError("a compression serves one model or optimizer: make one for each")
        for option in REFUSED:
            if getattr(model, option, False):
                raise UnsupportedError(f"a compression needs a model without {option}")
        hooks: list[tuple[Any, Any]] = [*model._comm_hooks]
        for hook, state in hooks:
            if hook is exchange and not state.serves(model):  # that of which the model is a copy
                model._comm_hooks.remove((hook, state))
                continue
            raise ConfigError(
                "a model takes one communication hook, and this one has "
                f"{getattr(hook, '__qualname__', hook)} already"
            )
        framework = Distributed(model.process_group)
        framework.bootstrap(model.process_group)  # or it says what is missing
        named, ignored = model.module.named_parameters(), model.parameters_to_ignore
        trained = [(n, p) for n, p in named if p.requires_grad and n not in ignored]
        parameters = self._take_names(trained, f"the model's {len(trained)} parameters")
        self._leave_door(framework)
        door = DdpDoor(model, parameters, self._session)
        model.register_comm_hook(self, exchange)
        self._open(door)

    def _leave_door(self, framework: Horovod | Distributed) -> None:
        """Go on from a door whose optimizer or model is gone, if there was one."""
        if self._door is not None:
            self._door.settle()
            self._door.drop_if_weights_moved()
            self._loaded_units = self._units()
            self._session.close()  # there may be other tensors, and other ranks
        self._session.framework = framework

    def serves(self, model: DistributedDataParallel) -> bool:
        """Whether this reduces the model's gradients."""
        return isinstance(self._door, DdpDoor) and self._door.serves(model)

    def _take_names(self, named: Sequence[tuple[str, Parameter]], whose: str) -> Parameters:
        """Names were given with the compression, or are those of what it serves."""
        if self._parameters is None:
            self._parameters = Parameters(named)
            if self._loaded_strictly is not None:
                self._load(self._state(), strict=self._loaded_strictly)
        elif not any(p in self._parameters for _, p in named):
            raise ConfigError(
                f"named_parameters of the compression must be those of {whose}, got none of them"
            )
        return self._parameters

    def _open(self, door: Door | DdpDoor) -> None:
        """Gradients come by this door from now on."""
        assert self._parameters is not None
        self._door = door
        self._take_units(**self._loaded_units)
        door.forgives = True  # what was loaded before there was one
        engine, below, alive = self._engine, self._run.dense_below, weakref.ref(door)
        by_name, sparse = dict(self._parameters), self._parameters.sparse()

        def handing(after: Assignment) -> Handover:
            there = alive()
            if there is None:
                return Handover((), engine, after, (), 0)
            return Handover(
                there.optimizers, engine, after, sparse, below, there.seen_scale or there.scale()
            )

        engine.exponents_of = lambda name: exponents_of(by_name[name])
        self._session.handing = handing
        dense = self._left_dense()
        if sum(map(len, dense.values())) == len(self._parameters):
            warn(f"nothing is compressed: all tensors are dense ({'; '.join(dense)})")


# Torch refuses annotations that are text, as all in this file are.
def exchange(compression, bucket):  # type: ignore[no-untyped-def]
    """DDP's communication hook, which a copy of the model keeps by name."""
    return torch.compiler.disable(compression._door.take)(bucket)


def is_horovods() -> bool:
    """Whether Horovod has started this process."""
    hvd: Any = sys.modules.get("horovod.torch")
    return hvd is not None and bool(hvd.is_initialized())
