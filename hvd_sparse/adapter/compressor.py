"""Horovod's `Compressor` interface in front of an engine."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from hvd_sparse.adapter.binding import (
    SPARSE_DTYPES,
    ParameterLookup,
    calling_optimizer,
    calling_parameter,
    name_in,
)
from hvd_sparse.adapter.dense import (
    Dense,
    as_horovod_takes_it,
    clipped_dense_method,
    dense_of,
    with_leftover,
)
from hvd_sparse.adapter.embeddings import EmbeddingExchange
from hvd_sparse.adapter.fate import StepFate
from hvd_sparse.adapter.handover import Handover, handing_over, memory_of
from hvd_sparse.adapter.levels import Hierarchical
from hvd_sparse.adapter.planning import planned_memory, refuse_lone_momentum
from hvd_sparse.adapter.refusals import (
    Registered,
    refuse_a_second_optimizer,
    refuse_double_momentum,
    refuse_embeddings_as_dense,
    refuse_unsupported,
    warn_of_slow_settings,
)
from hvd_sparse.adapter.session import Session, as_horovod_error, horovod_error
from hvd_sparse.adapter.states import States
from hvd_sparse.adapter.waiting import synchronize_asleep
from hvd_sparse.checks import check_choice
from hvd_sparse.engine import (
    Assignment,
    Engine,
    Observer,
    Stats,
    TensorSpec,
    WithDense,
    with_dense,
)
from hvd_sparse.errors import ConfigError, TransportError
from hvd_sparse.functional.communicator import ALGORITHMS


class Sparse(NamedTuple):
    """Context of a gradient that the engine reduces while Horovod reduces its stand-in."""

    name: str
    shape: torch.Size


class SparseCompressor:
    """What `hvd.DistributedOptimizer(compression=…)` is given; made by `hvd_sparse.Compression`.

    It serves one optimizer. The gradients that it hands back are views of buffers that it writes
    again in the next step, once the next gradients have come.

    Args:
        named_parameters: The optimizer's parameters by name, or None to read them from it.
        method: How to compress and exchange: a `Method` for all tensors, or an `Assignment`.
        transport: Name of a transport, or "auto".
        timeout_s: Seconds without a sign of life after which a peer is given up.
        busy_timeout_s: Seconds after which a wait for a peer that is alive is given up, or None.
        hierarchical: Whether to exchange on two levels, inside hosts and between them.
        dense_below: Tensors of fewer elements go through Horovod's own allreduce.
        observer: Is told of plans and steps, or None.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]] | None,
        method: Assignment,
        *,
        transport: str,
        timeout_s: float,
        busy_timeout_s: float | None = None,
        hierarchical: Hierarchical = False,
        dense_below: int,
        observer: Observer | None = None,
    ) -> None:
        self.method = method
        self.observer = observer
        self._transport_name = transport
        self._timeout_s, self._busy_timeout_s = timeout_s, busy_timeout_s
        self._hierarchical: Hierarchical = hierarchical
        self._dense_below = dense_below
        self._lookup = None if named_parameters is None else ParameterLookup(named_parameters)
        self._start()

    def _start(self) -> None:
        self._engine = Engine(self._whole(self.method), self.observer)
        self._session = Session(
            self._engine,
            self._transport_name,
            self._timeout_s,
            self._busy_timeout_s,
            self._hierarchical,
        )
        self._states = States(self._engine, self._session, self._timeout_s)
        if self._lookup is not None:
            self._states.know(self._lookup)
        self._optimizer: weakref.ref[Any] | None = None
        self._fate: StepFate | None = None
        self._registered: Registered | None = None
        self._served: set[str] = set()
        self._stepping = False
        self._warned: set[str] = set()
        try:
            import horovod.torch.elastic  # noqa: F401
        except ImportError:
            return  # without Horovod there is no elastic state to serve
        from hvd_sparse.adapter.elastic import register

        register(SparseCompressor)

    # -- Horovod's interface -----------------------------------------------------------------------

    def compress(self, tensor: Tensor) -> tuple[Tensor, Dense | Sparse]:
        """Take a gradient over, or leave it to Horovod.

        Args:
            tensor: A gradient of any shape, or any other tensor, which is left to Horovod.

        Returns:
            What Horovod is to reduce, and what `decompress` needs to know.
        """
        if not (self._stepping and self._session.is_current()) and not self._begin_step():
            return tensor, dense_of(tensor.dtype)
        assert self._lookup is not None
        name = self._lookup.name_of(tensor)
        if name is None:
            self._warn_once(
                f"the gradient of {name_in(self._bound())}, of shape {tuple(tensor.shape)}, "
                f"belongs to none of the {len(self._lookup)} named_parameters: it is reduced "
                "densely"
            )
            return tensor, dense_of(tensor.dtype)
        if name not in self._served:
            self._serve(name)
        if self._session.planning is not None:
            self._session.planning.arrived(name)
        spec = self._lookup.spec_of(name, tensor)
        if not (self._engine.awaits(spec) or self._is_sparse(spec, tensor)):
            leftover = self._engine.residuals.leftover(name)
            if leftover is None or self._holds(name):
                return as_horovod_takes_it(tensor), dense_of(tensor.dtype)
            return with_leftover(name, tensor, leftover, self._engine)
        frozen = not self._lookup.requires_grad(name)  # Horovod reduces it all the same
        gradient = tensor.detach().zero_() if frozen else tensor.detach()
        self._engine.submit(spec, gradient, frozen=frozen)
        return self._session.standin(), Sparse(name, tensor.shape)

    def decompress(self, tensor: Tensor, ctx: Dense | Sparse | None) -> Tensor:
        """Give the reduced gradient back.

        Args:
            tensor: What Horovod made of the tensor that `compress` returned.
            ctx: The context that `compress` returned; None for Horovod's own sparse gradients.

        Raises:
            UnsupportedError: The optimizer's reduction is no sum or average over all ranks.
            HorovodInternalError: A peer is gone; `hvd.elastic` recovers from it.
            PlanError: Ranks have different gradients.
        """
        embeddings = self._session.embeddings
        if embeddings is not None and (self._session.is_current() or self._begin_step()):
            embeddings.launch(self._bound()._requires_update)  # before it waits for anything
        self._stepping = False
        if ctx is None:
            return self._embedding_gradient(tensor)
        result = self._reduced(tensor, ctx)
        if self._session.planning is not None:
            self._session.planning.returned()
        return result

    def _reduced(self, tensor: Tensor, ctx: Dense | Sparse) -> Tensor:
        if isinstance(ctx, Dense):
            if self._fate is not None:
                self._fate.reduced_densely(tensor)
            if ctx.flushed is not None:
                self._engine.residuals.flushed(ctx.flushed)
            return tensor.to(ctx.dtype)
        self._session.learn_scale(tensor)
        try:
            result = self._engine.result(ctx.name)
        except TransportError as error:
            raise horovod_error(error) from error
        if result.shape != ctx.shape:
            raise RuntimeError(f"{ctx.name}: shape {tuple(result.shape)} is not {tuple(ctx.shape)}")
        return result

    def _embedding_gradient(self, tensor: Tensor) -> Tensor:
        """What becomes of a sparse gradient that Horovod has gathered, or of its stand-in."""
        optimizer = self._bound()
        embeddings = self._session.embeddings
        if embeddings is None or optimizer is None:
            return tensor
        import horovod.torch as hvd

        scale = 1.0 / self._session.world_size if optimizer.op == hvd.Average else 1.0
        with as_horovod_error():
            result = embeddings.result(calling_parameter(), scale)
        return tensor if result is None else result

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
        if self._bound() is not None:
            raise ConfigError("exchange_embeddings must be called before the first backward pass")
        if self._session.embeddings is not None:
            raise ConfigError("exchange_embeddings must be called once, got a second call")
        parameters = (p for _, p in named_parameters)
        self._session.embeddings = EmbeddingExchange(parameters, algorithm)

    def stats(self) -> Stats:
        """What was selected, sent and waited for, per bucket and step: a snapshot.

        Its text is a short table, and `later.since(earlier)` is what happened between two of them.
        It may be called anywhere. A skipped step is counted once the next one has begun.
        """
        if self._fate is not None and self._fate.counts():
            self._settle()
        return self._engine.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and thresholds; every rank saves its own. Call between steps."""
        self._settle("state_dict()")
        return self._states.save()

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
        self._states.load(state, strict=strict)

    def save_checkpoint(self, path: str | os.PathLike[str], *, process_set: Any = None) -> None:
        """Write all ranks' states into a folder; all ranks call this between the same two steps.

        Until everything is written, the folder's earlier checkpoint is whole. On hosts that share
        no file system every host gets the files of its own ranks, which can be loaded by the same
        ranks on the same hosts only.

        Args:
            path: A folder, which is made where there is none.
            process_set: The optimizer's, where it has one; needed before the first step only.

        Raises:
            CheckpointError: On every rank, where it could not be written on any.
        """
        self._settle("save_checkpoint()")
        self._states.save_checkpoint(path, self._process_set(process_set))

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
        self._settle("load_checkpoint()")
        self._states.load_checkpoint(path, self._process_set(process_set), missing)

    def _bound(self) -> Any:
        """The optimizer that this serves; None before the first step, and once it is gone."""
        return None if self._optimizer is None else self._optimizer()

    def _process_set(self, given: Any) -> Any:
        """That of the optimizer, or what is given before the first step; None: all ranks."""
        optimizer = self._bound()
        return given if optimizer is None else optimizer.process_set

    def reassign(self, method: Assignment) -> None:
        """Compress otherwise from the next step on, without losing a residual.

        All ranks call this between the same two steps. A tensor that was sparse and now is dense
        has its residual added to its next gradients, at most half a gradient's norm in a step.
        Momentum goes along, between the compression and `MomentumCorrectedSGD`; not while no rank
        is connected, as after `close()` or in a callback of an elastic reset.

        Args:
            method: A `Method` for all tensors, or an `Assignment`: the `method` of another
                compression, made by any constructor.

        Raises:
            PlanError: On every rank, where they want different ones.
        """
        optimizer, assignment = self._bound(), self._whole(method)
        if optimizer is not None:
            self._refuse_double_momentum(optimizer, assignment)
        self._settle("reassign()")
        handover = None
        if optimizer is not None and self._lookup is not None:
            named = [(name, p) for name, p in self._lookup if p.dtype in SPARSE_DTYPES]
            handover = Handover(optimizer, self._engine, assignment, named, self._dense_below)
        self.method = method
        self._session.reassign(assignment, handover, self._unit())

    def _whole(self, method: Assignment) -> Assignment:
        """As the engine gets it: with dense tensors, too, where gradients are clipped."""
        return with_dense(method, clipped_dense_method, self._dense_below)

    def _unit(self) -> float:
        """The loss scale that the gradients are in units of; 1 where there is none."""
        return 1.0 if self._fate is None or self._fate.unit is None else self._fate.unit

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
            ConfigError: There is no such parameter, or a step is under way.
        """
        names = [names] if isinstance(names, str) else list(names)
        known = {} if self._lookup is None else dict(self._lookup)
        unknown = sorted(set(names) - known.keys())
        if unknown:
            raise ConfigError(f"names must be those of parameters, got {', '.join(unknown)}")
        self._settle("forget()")
        return self._engine.forget(names)

    def corrects_momentum(self, parameter: Parameter) -> bool:
        """Whether the last gradient of a parameter came out of momentum correction."""
        name = None if self._lookup is None else self._lookup.name_of_parameter(parameter)
        method = None if name is None else self._engine.method_of(name)
        return method is not None and method.memory.momentum > 0

    def give_up_step(self) -> None:
        """Let go of a step that has failed, after which a state is loaded; see `TorchState`."""
        self._settle()
        if self._session.embeddings is not None:
            self._session.embeddings.give_up()

    def close(self) -> None:
        """Stop the background thread and close the connections; a later step opens them again."""
        self._settle("close()")
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without its engine: a copy reads its parameters from the optimizer it serves."""
        return {
            "method": self.method,
            "observer": self.observer,
            "_transport_name": self._transport_name,
            "_timeout_s": self._timeout_s,
            "_busy_timeout_s": self._busy_timeout_s,
            "_hierarchical": self._hierarchical,
            "_dense_below": self._dense_below,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lookup = None
        self._start()

    # -- the start of a step -----------------------------------------------------------------------

    def _begin_step(self) -> bool:
        """See who calls, and connect where Horovod was started anew; false for a stranger."""
        optimizer = calling_optimizer(self)
        if optimizer is None:
            return False
        if self._bound() is not optimizer:
            self._bind(optimizer)
        assert self._fate is not None
        assert self._registered is not None
        self._fate.refuse_closures(optimizer)
        self._registered.refuse_others()
        self._settle()
        self._fate.begin_step()
        self._engine.unit = self._unit()
        if self._session.is_current():
            self._session.raise_failure()  # Horovod, which has ended, too, would name nobody
            self._session.begin_step()
        else:
            assert self._lookup is not None
            self._session.connect(optimizer, self._lookup, self._device())
            self._warn_where_forgotten()
        self._engine.begin_step()
        self._stepping = True
        return True

    def _warn_where_forgotten(self) -> None:
        from hvd_sparse.adapter.elastic import is_forgotten

        if is_forgotten(self):
            self._warn_once(
                "hvd.elastic restores the weights without the residuals, which then hold what the "
                "repeated steps bring again: pass TorchState(..., compression=compression)"
            )

    def _settle(self, call: str | None = None) -> None:
        """See what became of the last step: its results were applied, or it never happened.

        Args:
            call: The user's, which is to name where a step comes after all; None: the next step's.
        """
        if self._fate is None:
            return
        if self._engine.settle(self._fate.counts()):
            self._fate.taken_back = call
        factor = self._fate.rescaling()
        if factor != 1.0:
            self._engine.rescale(factor)

    def _serve(self, name: str) -> None:
        """See once who brings a parameter's gradient: others may use the same backward pass."""
        optimizer = calling_optimizer(self)
        if optimizer is not None and optimizer is not self._bound():
            refuse_a_second_optimizer()
        self._served.add(name)

    def _bind(self, optimizer: Any) -> None:
        if self._bound() is not None and self._served:
            refuse_a_second_optimizer()
        self._served.clear()
        refuse_unsupported(optimizer)
        if self._session.embeddings is not None:
            refuse_embeddings_as_dense(optimizer)
        warn_of_slow_settings()
        if self._lookup is None:
            self._lookup = ParameterLookup((n, p) for p, n in optimizer._parameter_names.items())
            self._states.know(self._lookup)
        self._refuse_double_momentum(optimizer, self._engine.assignment)
        self._optimizer = weakref.ref(optimizer)
        self._fate, self._registered = StepFate(optimizer), Registered(optimizer)
        self._states.bind(self._fate)
        named = [(name, p) for name, p in self._lookup if p.dtype in SPARSE_DTYPES]
        self._session.handing = handing_over(optimizer, self._engine, named, self._dense_below)
        let_go_after_steps(optimizer, self._engine)
        synchronize_asleep(optimizer, self._session.raise_failure, self._engine.wait)

    def _refuse_double_momentum(self, optimizer: Any, assignment: Assignment) -> None:
        assert self._lookup is not None
        corrected, planned = {}, []
        for name, parameter in self._lookup:
            if parameter.dtype not in SPARSE_DTYPES:
                continue
            memory = planned_memory(assignment, name, parameter)
            if memory is not None:
                planned.append(memory)
            else:
                memory = memory_of(assignment, name, parameter, self._dense_below)
            if memory is not None and memory.momentum > 0:
                corrected[parameter] = memory
        refuse_double_momentum(optimizer, corrected)
        refuse_lone_momentum(optimizer, planned)

    def _is_large(self, tensor: Tensor) -> bool:
        """Whether a tensor's type and size allow for a sparse exchange."""
        clips = isinstance(self._engine.assignment, WithDense)
        least = 1 if clips else max(1, self._dense_below)
        return tensor.dtype in SPARSE_DTYPES and tensor.numel() >= least

    def _device(self) -> torch.device | None:
        """Where the gradients are that the engine exchanges; None where there are none."""
        assert self._lookup is not None
        return next((p.device for _, p in self._lookup if self._is_large(p)), None)

    def _is_sparse(self, spec: TensorSpec, tensor: Tensor) -> bool:
        if not self._is_large(tensor):
            return False
        if not self._engine.takes(spec):
            return False
        if not self._engine.expects(spec.name):
            self._warn_once(
                f"{spec.name!r} had no gradient in the first step: it is reduced densely"
            )
            return False
        return True

    def _holds(self, name: str) -> bool:
        """Whether what waits of a dense tensor is to go on waiting in this step."""
        assert self._lookup is not None
        planning = self._session.planning
        return (planning is not None and planning.holds) or not self._lookup.requires_grad(name)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"hvd_sparse: {message}", stacklevel=3)


def let_go_after_steps(optimizer: Any, engine: Engine) -> None:
    """Let an engine drop its gradients once the optimizer has read the results in their place."""
    reference = weakref.ref(engine)  # an optimizer may outlive its compression

    def let_go(*_: object) -> None:
        engine = reference()
        if engine is not None:
            engine.let_go()

    optimizer.register_step_post_hook(let_go)
