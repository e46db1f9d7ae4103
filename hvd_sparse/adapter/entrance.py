"""What the doors share: how a step opens, where its gradients go, and how it is settled."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hvd_sparse.adapter.binding import SPARSE_DTYPES, Entry, Parameters, any_of
from hvd_sparse.adapter.fate import Fates, Rewinds, weakly
from hvd_sparse.adapter.handover import refuse_momenta
from hvd_sparse.adapter.refusals import ClippedMomenta
from hvd_sparse.adapter.session import Session
from hvd_sparse.engine import Assignment, Engine, TensorSpec, WithDense
from hvd_sparse.errors import ConfigError, TransportError, warn
from hvd_sparse.optim import REDUCED_BY, SparseAdamW, parameters_of, reducer_of

LOOK_S = 0.05
"""From one look for a failure to the next, while exchanges are waited for."""

CAUSE_S, CAUSE_INTERVAL_S = 1.0, 0.01
"""How long after the framework, which names no rank, an exchange may say what it has failed by."""


class Entrance:
    """The gradients of one optimizer or model on their way to the engine, and back.

    Args:
        parameters: Those of the compression.
        session: Connects the ranks and the engine.
        fates: Follows what was given back.
        entries: Of the optimizer's or model's parameters.
        served: Horovod's optimizer, or the model; is not kept alive.

    Attributes:
        fates: Follows what was given back.
        forgives: Whether the compression's own state was loaded, too, before the next step.
        seen_scale: What `scale()` was when residuals last gathered; None: not known.
        doors: All there are, which hear of every optimizer's steps.
    """

    doors: ClassVar[tuple[weakref.ref[Entrance], ...]] = ()

    def __init__(
        self,
        parameters: Parameters,
        session: Session,
        fates: Fates,
        entries: Iterable[Entry],
        served: Any,
    ) -> None:
        self._parameters, self._session, self._engine = parameters, session, session.engine
        self._dense_below = session.run.dense_below
        self.fates = fates
        self.seen_scale: float | None = None
        self._warned: set[str] = set()
        self._momenta: WeakKeyDictionary[Any, list[tuple[Any, ...]]] = WeakKeyDictionary()
        self._met: WeakKeyDictionary[Any, Rewinds] = WeakKeyDictionary()
        self._followed: set[Rewinds] = set()  # also the last ones, whose optimizers are gone
        self._served = weakref.ref(served)
        self.forgives = False
        self._thread = threading.get_ident()
        self._handed: list[Entry] = []
        self._is_open = self._holds_back = self._changes_in_place = False
        if not Entrance.doors:
            register_optimizer_step_pre_hook(before_step)
            register_optimizer_step_post_hook(after_step)
        there = (each for each in Entrance.doors if each() is not None)
        Entrance.doors = (*there, weakref.ref(self))
        REDUCED_BY.update((e.parameter, weakref.ref(self)) for e in entries if e.name is not None)

    @property
    def optimizer(self) -> Any:
        """What the gradients are for; None while it is not known, and once it is gone."""
        raise NotImplementedError

    @property
    def optimizers(self) -> list[Any]:
        """Those that were met, and are still there."""
        return [o for each in self._met.keyrefs() if (o := each()) is not None]

    @property
    def rewinds(self) -> list[Rewinds]:
        """What sees that their states were loaded; those that share parameters have one."""
        return list(dict.fromkeys(self._met.values()))

    @property
    def group(self) -> Any:
        """The process set or process group of the ranks."""
        raise NotImplementedError

    @property
    def unit(self) -> float:
        """The loss scale that the gradients are in units of; 1 where there is none."""
        return 1.0 if self.fates.unit is None else self.fates.unit

    def scale(self) -> float:
        """What the framework multiplies sums over the ranks by."""
        raise NotImplementedError

    def corrects_momentum(self, parameter: Parameter) -> bool:
        """Whether the last gradient of a parameter came out of momentum correction."""
        name = None if self._served() is None else self._parameters.name_of(parameter)
        return self._engine.corrects_momentum(name)

    def preconditions(self, parameter: Parameter) -> bool:
        """Whether the last gradient of a parameter was selected in units of `SparseAdamW`."""
        name = None if self._served() is None else self._parameters.name_of(parameter)
        method = None if name is None else self._engine.method_of(name)
        return method is not None and method.memory.preconditioned

    @property
    def serves_any(self) -> bool:
        """Whether its optimizer or model is still there."""
        return self._served() is not None

    def before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """An optimizer begins a step: those that have parameters of this one's are met here.

        Raises:
            ConfigError: Momentum would be applied a second time, or another one.
        """
        parameters = parameters_of(optimizer)
        if not self._follows(optimizer) or not any(map(self._reduces, parameters)):
            return
        self._thread = threading.get_ident()
        if not any(each is optimizer for each in self.optimizers):
            self._meet_optimizer(optimizer)
        self._follow_momenta(optimizer)
        if self._ends_passes(optimizer):
            self.fates.before_step(optimizer, arguments, keywords)
        else:
            self.fates.look_for_scaler(optimizer)

    def _reduces(self, parameter: Parameter) -> bool:
        """Whether this is what a parameter's gradients come from."""
        return reducer_of(parameter) is self

    def _follows(self, optimizer: Any) -> bool:
        """Whether it may be what the gradients are for: no wrapper, in which another steps."""
        return self.serves_any and hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")

    def _ends_passes(self, optimizer: Any) -> bool:
        """Whether the framework's passes end with its steps, so that closures are followed."""
        del optimizer
        return True

    def _meet_optimizer(self, optimizer: Any) -> None:
        parameters = set(parameters_of(optimizer))
        alike = (r for o, r in self._met.items() if not parameters.isdisjoint(parameters_of(o)))
        rewinds = self._met[optimizer] = next(alike, None) or Rewinds()
        self._followed = set(self._met.values())
        ClippedMomenta(optimizer)
        rewinds.follow(optimizer)
        hooks = optimizer._optimizer_step_post_hooks
        own = [weakly(rewinds.stepped), *[after_step] * (after_step not in hooks.values())]
        for hook in own:  # before the script's, which may raise
            hooks.move_to_end(optimizer.register_step_post_hook(hook).id, last=False)

    def settle(self, call: str | None = None) -> None:
        """See what became of the last step's results; the residuals follow the loss scale.

        Args:
            call: The user's; None: the next step begins.

        Raises:
            ConfigError: A hook has made the call, while the backward pass hands gradients in.
        """
        if call is not None and self._is_open and torch._C._current_graph_task_id() != -1:
            raise ConfigError(f"{call} must be called between steps, got a call within one")
        undone = self.fates.settle(call, self.optimizers)
        if self._is_open:  # it has failed: nothing of it was given back
            undone.update(self._handed)
        self._engine.settle({e.name for e in undone if e.name is not None})
        factor = self.fates.rescaling()
        if factor != 1.0:
            self._engine.rescale(factor)
        self._engine.unit = self.unit

    def check_between_steps(self, call: str) -> None:
        """Refuse a call between `backward()` and the step that applies its gradients.

        Raises:
            ConfigError: It is one.
        """
        elsewhere = threading.get_ident() != self._thread
        is_within = self._is_open or (elsewhere and not self.fates.is_settled)  # or soon applied
        if is_within and self._engine.error is None:
            raise ConfigError(f"{call} must be called between steps, got a call within one")

    def give_up(self, call: str | None = "load_state_dict()") -> None:
        """Let go of a step that has failed, or that the framework forgets; see `settle`."""
        if self._is_open:
            self.settle(call)
            self._close_step()
            while self._engine.error is None and not self._is_recovering():  # peers may be late
                if self._engine.wait(LOOK_S):
                    break
            if self._engine.error is None:  # what was under way must not be the next step's
                self._engine.reassign(self._engine.assignment)
            if self._session.embeddings is not None:
                self._session.embeddings.give_up()

    def _is_recovering(self) -> bool:
        """Whether a state is loaded since the framework has failed: peers may wait for that."""
        return isinstance(sys.exc_info()[1], self._session.framework.failures())

    def _open_step(self) -> None:
        """The step's first gradient is there, or none has come at its end."""
        if not self._session.is_current():  # an interrupt may have come before zero_grad()
            self.fates.forget_taken_back()
        self.settle()
        # By clipping, or by the units of `SparseAdamW`, the engine changes gradients.
        clips = isinstance(self._engine.assignment, WithDense)
        self._changes_in_place = clips or isinstance(self.optimizer, SparseAdamW)
        for rewinds in self.rewinds:
            if rewinds.seen() and not self.forgives:
                owners = (o for o, each in self._met.items() if each is rewinds)
                names = (self._parameters.name_of(p) for o in owners for p in parameters_of(o))
                why = "optimizer.load_state_dict() went back to another state than the last step's"
                self._drop_residuals(names, why)
        self.forgives = False
        scale = self.scale()
        if self.seen_scale not in (None, scale):  # in a world of another size: nothing weighs more
            self._engine.rescale(self.seen_scale / scale)
        self.seen_scale = scale
        self._session.raise_failure()  # the framework, which has ended, too, would name nobody
        self._holds_back = not self._session.is_current() or self._session.begin_step()
        if not self._holds_back:
            self._engine.scale = self.scale()
            self._engine.begin_step()
        self._is_open = True
        self.fates.leave_what_is_kept()

    def refuse(self, assignment: Assignment) -> None:
        """Refuse an assignment that does not fit what applies what is reduced by it."""
        for optimizer in dict.fromkeys((self.optimizer, *self.optimizers)):
            if optimizer is not None:
                refuse_momenta(optimizer, self._parameters, assignment, self._dense_below)

    def _follow_momenta(self, optimizer: Any) -> None:
        """Momenta may have changed since the last step; ConfigError where they may not be so."""
        groups = optimizer.param_groups  # a schedule may cycle through betas that are not 0
        momenta = [
            (g.get("momentum"), g.get("nesterov"), bool((g.get("betas") or (0,))[0]))
            for g in groups
        ]
        if momenta != self._momenta.get(optimizer):
            assignment = self._engine.assignment
            refuse_momenta(optimizer, self._parameters, assignment, self._dense_below)
            self._momenta[optimizer] = momenta

    def drop_if_weights_moved(self) -> None:
        """Whoever comes after this one may begin with weights that the last step has not left."""
        if not self.forgives and any(rewinds.have_moved() for rewinds in self._followed):
            why = "the weights of a new optimizer are not those that the last step has left"
            self._drop_residuals((name for name, _ in self._parameters), why)

    def _drop_residuals(self, names: Iterable[str | None], why: str) -> None:
        lost = self._engine.forget(list(dict.fromkeys(filter(None, names))))
        if lost:
            warn(
                f"dropped the residuals, since {why} (load the compression's own state, too, where "
                f"it was saved): L1 norm {lost:g}"
            )

    def _meet(self) -> None:
        """All ranks are at the end of this step: what they have to agree on is agreed on."""
        session = self._session
        session.arrivals = [entry.name for entry in self._handed if entry.name is not None]
        if session.is_current():
            session.meet()
        else:
            self._connect()
        self._engine.scale, self._engine.unit = self.scale(), self.unit
        self._engine.begin_step()
        self._holds_back = False
        for entry in self._handed:
            if entry.reduced is None and entry.gradient is not None:
                self._pass_on(entry, entry.gradient)

    def _connect(self) -> None:
        raise NotImplementedError

    def _pass_on(self, entry: Entry, gradient: Tensor) -> None:
        """Give a gradient to the engine, to the embeddings' exchange, or to the framework."""
        if not gradient.is_sparse:
            self._pass_on_dense(entry, gradient)
            return
        embeddings, p, name = self._session.embeddings, entry.parameter, entry.name
        if embeddings is not None and embeddings.takes(p):
            embeddings.hand_in(p, gradient)
            entry.reduced = self._session.errors()(lambda: embeddings.result(p, self.scale()))
        else:
            self._give_to_framework(entry, gradient)
        if name is not None and self._engine.planned and self._engine.expects(name):
            zeros = torch.zeros_like(p, requires_grad=False)  # it had a dense gradient before
            self._engine.submit(entry.spec_of(zeros), zeros, frozen=True)

    def _give_to_framework(self, entry: Entry, gradient: Tensor) -> None:
        """Let the framework reduce a gradient, dense or sparse."""
        raise NotImplementedError

    def _pass_on_dense(self, entry: Entry, gradient: Tensor) -> None:
        """The same for a gradient that is no sparse tensor."""
        engine, planning, name = self._engine, self._session.planning, entry.name
        if name is None:
            self._give_to_framework(entry, gradient)
            return
        if planning is not None:
            planning.arrived(name)
        spec, is_frozen = entry.spec_of(gradient), not entry.parameter.requires_grad
        if is_frozen and not entry.is_made:  # some scripts give it one by hand
            is_frozen = not any_of(gradient)
        if engine.awaits(spec) or self._is_sparse(spec, gradient, is_frozen):
            values = gradient
            if self._changes_in_place:
                values = gradient.data  # with a count of changes of its own
            engine.submit(spec, values, frozen=is_frozen)
            entry.is_followed, entry.has_alias = True, values is not gradient
            return
        holds = (planning is not None and planning.holds) or is_frozen
        leftover = None if holds else engine.residuals.leftover(name)
        if leftover is not None:
            gradient = with_leftover(spec, gradient, leftover, engine)
            entry.is_followed = True
        self._give_to_framework(entry, gradient)

    def _engine_results(self) -> Mapping[Any, Tensor]:
        """What the engine has reduced in this step, once all of it is there."""
        engine = self._engine
        for name, reduced in ((entry.name, entry.reduced) for entry in self._handed):
            # Of a sparse gradient it had zeros, where it expects dense ones.
            if name and (reduced is None or (engine.planned and engine.expects(name))):
                return engine.results(name)
        return {}

    def _is_sparse(self, spec: TensorSpec, gradient: Tensor, is_frozen: bool) -> bool:
        planned = self._engine.planned
        if planned and self._engine.expects(spec.name):
            return True  # the engine says where it may not be so any more
        if not is_large(gradient, self._engine, self._dense_below) or not self._engine.takes(spec):
            return False
        if planned and not is_frozen:  # as an embedding may be, whose gradients were sparse
            self._warn_once(
                f"{spec.name!r} had no gradient in the first step: it is reduced densely"
            )
        return not planned

    def _device(self) -> torch.device | None:
        """Where the gradients are that the engine exchanges; None where there are none."""
        large = (p for _, p in self._parameters if is_large(p, self._engine, self._dense_below))
        return next((p.device for p in large), None)

    def _warn_of_strangers(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.name is None and entry.parameter.requires_grad:
                self._warn_once(
                    f"the gradient of {entry.label!r}, of shape {tuple(entry.parameter.shape)}, "
                    f"belongs to none of the {len(self._parameters)} named_parameters: it is "
                    "reduced densely"
                )

    def _warn_of_unheld(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._warn_once(
                f"no optimizer that has stepped has {entries[0].label!r}, nor {len(entries) - 1} "
                "other tensors: freeze them by requires_grad_(False), or call "
                "compression.applied() where the script moves them itself: what they send takes "
                "the place of others'"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)

    @contextmanager
    def _first_cause(self) -> Iterator[None]:
        """Where the framework has failed, which names no rank, the exchange may know why."""
        try:
            yield
        except TransportError as error:
            raise self._session.framework.error(error) from error
        except self._session.framework.failures():
            until = time.monotonic() + CAUSE_S
            while time.monotonic() < until:
                self._session.raise_failure()
                time.sleep(CAUSE_INTERVAL_S)
            raise

    def _close_step(self) -> None:
        for entry in self._handed:
            entry.gradient, entry.reduced = None, None
            entry.is_followed = entry.has_alias = False
        self._open_nothing()

    def _open_nothing(self) -> None:
        self._handed = []
        self._is_open = self._holds_back = False


def before_step(*step: Any) -> None:
    """Pre-step hook of every optimizer, which stays: torch goes through its hooks as they are."""
    for reference in Entrance.doors:
        if (entrance := reference()) is not None:
            entrance.before_step(*step)


def after_step(optimizer: Any, *_: object) -> None:
    """Post-step hook of every optimizer."""
    for reference in Entrance.doors:
        if (entrance := reference()) is not None:
            entrance.fates.after_step(optimizer)
            if optimizer in entrance._met:
                entrance._session.divergence.stepped()


def is_large(tensor: Tensor, engine: Engine, dense_below: int) -> bool:
    """Whether a tensor's type and size allow for a sparse exchange."""
    least = 1 if isinstance(engine.assignment, WithDense) else max(1, dense_below)
    return tensor.dtype in SPARSE_DTYPES and tensor.numel() >= least


def by_kind(parts: Iterable[tuple[Entry, Tensor]]) -> list[list[tuple[Entry, Tensor]]]:
    """Dense gradients by their type and device: what one allreduce can take."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Entry, Tensor]]] = {}
    for entry, gradient in parts:
        kinds.setdefault((gradient.dtype, gradient.device), []).append((entry, gradient))
    return list(kinds.values())


def is_shared(gradient: Tensor, ours: int) -> bool:
    """Whether others than `ours` have a gradient's memory, too; also where torch cannot tell."""
    storage, count = gradient.untyped_storage(), getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not hasattr(gradient, "_use_count"):
        return True  # torch 2.3, and before 2.8 builds for the CPU
    uses: int = count(storage._cdata)  # `storage` is one of them
    # DLPack's views use the tensor, not its storage; other processes have a mapping of their own.
    held: int = gradient._use_count()
    is_mapped = storage.device.type == "cpu" and storage.is_shared()  # a device's always is
    is_foreign = not storage.resizable()  # NumPy's, say, or another library's
    return uses > 1 + ours or held > 2 or is_mapped or is_foreign


def is_part(gradient: Tensor) -> bool:
    """Whether a gradient's memory is a part of a larger one."""
    if gradient.is_sparse:
        return False
    return gradient.untyped_storage().nbytes() > gradient.numel() * gradient.itemsize


def with_leftover(spec: TensorSpec, gradient: Tensor, leftover: Tensor, engine: Engine) -> Tensor:
    """A dense gradient, and with it some of what was not sent while it was exchanged sparsely.

    Raises:
        ConfigError: What was not sent has another shape.
    """
    if leftover.shape != gradient.shape:
        raise ConfigError(
            f"residual of {spec.name!r}: shape must be {tuple(gradient.shape)}, "
            f"got {tuple(leftover.shape)}"
        )
    released = engine.residuals.release(spec.name, gradient)
    assert released is not None
    together = released.to(gradient.device) + gradient  # float32, or 64
    # What a rank with nothing left hands over, too.
    return together.half() if gradient.dtype == torch.float16 else together
