"""The way in and out: what this package knows of Horovod's optimizer stands here.

Horovod 0.28.1 calls an instance's `_allreduce_grad_async(p)` from the hook of p's gradient, and
from `synchronize` for gradients that did not come. The method returns a handle and a context.
Where the handle can be called, `synchronize` calls it for the reduced gradient. A door takes the
place of that method on one instance. Horovod then sees no tensor of what is exchanged here.

Within a step:
  1. Hooks hand gradients in. Nothing waits there, and nothing is agreed on.
  2. `synchronize` hands in the rest, meets the other ranks where that is due, waits, and gives the
     reduced gradients back.

Each step Horovod sums one small tensor, the pulse. It tells what only Horovod's controller knows:
that all ranks take part (`hvd.join()` ends that), and how many of them bring a new gradient.
"""

from __future__ import annotations

import functools
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from hvd_sparse.adapter.binding import (
    SAMPLED_ENTRIES,
    SAMPLED_TENSORS,
    SPARSE_DTYPES,
    Entry,
    Parameters,
)
from hvd_sparse.adapter.fate import Fates, Rewinds, weakly
from hvd_sparse.adapter.handover import refuse_momenta
from hvd_sparse.adapter.refusals import refuse_operation, refuse_unregistered
from hvd_sparse.adapter.session import Session, as_horovod_error, horovod_error
from hvd_sparse.engine import Engine, TensorSpec, WithDense
from hvd_sparse.errors import ConfigError, TransportError, UnsupportedError, warn
from hvd_sparse.optim import SparseAdamW
from hvd_sparse.transports import horovod_handles
from hvd_sparse.transports.horovod_handles import SPIN_S, Pauses

USED_NAMES = (
    *("_allreduce_grad_async", "_handles", "_requires_update", "_parameter_names", "_groups"),
    *("_should_synchronize", "_synchronized", "_allreduce_delay", "_sparse_allreduce_grad_async"),
    *("backward_passes_per_step", "gradient_predivide_factor", "op", "process_set"),
)
"""What of Horovod's optimizer is used, beside `synchronize`, `step` and the hooks of torch's."""

LOOK_S = 0.05
"""From one look at Horovod to the next, while exchanges are waited for."""

SLEPT_SHARE, LONGEST_SLEEP_S = 0.1, 2e-3
"""As Pauses has them, but longer: every look wakes this thread on a core that Horovod's may need. A
dense step of a small transformer, 2 ranks on 2 cores, takes 0.94 of plain Horovod's time with these
(3 launches: 0.93 to 0.94), and took 1.06 to 1.13 with sleeps of a fifth."""

CAUSE_S, CAUSE_INTERVAL_S = 1.0, 0.01
"""How long after Horovod, which names no rank, an exchange may still say what it has failed by."""

SINGLE, GROUPED, SPARSE = "single", "grouped", "sparse"
"""How Horovod's own method has begun to reduce a gradient before there was a door."""


class Handles(dict[Any, Any]):
    """Horovod's handles, of which its `synchronize` lets go last.

    Args:
        handles: Those that there are.
        end: Is called then.
    """

    def __init__(self, handles: Mapping[Any, Any], end: Callable[[], None]) -> None:
        super().__init__(handles)
        self._end = end

    @override
    def clear(self) -> None:
        super().clear()
        self._end()


class Door:
    """One Horovod optimizer's gradients on their way to the engine or to Horovod, and back.

    Args:
        optimizer: Horovod's; is not kept alive.
        parameters: Those of the compression.
        engine: Reduces what is compressed.
        session: Connects the ranks.
        dense_below: Tensors of fewer elements are reduced by Horovod.

    Attributes:
        fates: Follows what was given back.
        rewinds: Sees that the optimizer's state was loaded.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Parameters,
        engine: Engine,
        session: Session,
        dense_below: int,
    ) -> None:
        for name in USED_NAMES:
            if not hasattr(optimizer, name):
                raise UnsupportedError(
                    f"Horovod's optimizer has no {name!r}: this package knows Horovod 0.28.1"
                )
        labels = optimizer._parameter_names
        self._entries = {id(p): Entry(p, n, parameters.name_of(p)) for p, n in labels.items()}
        for entry in self._entries.values():
            entry.handle = functools.partial(self._result, entry), None
        self.fates = Fates(optimizer, self._entries, engine.corrects_momentum)
        self.rewinds = Rewinds(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._parameters, self._engine, self._session = parameters, engine, session
        self._dense_below = dense_below
        self._momenta: list[tuple[Any, Any]] = []
        self._needing: list[bool] = []
        self._op: Any = None
        self._warned: set[str] = set()
        self._begun: list[tuple[str, str, int]] = []
        self._pulse: int | None
        self._results: Mapping[str, Tensor]
        self._pulse_name = f"hvd_sparse.step.{crc32(repr(sorted(labels.values())).encode()):08x}"
        self._thread = threading.get_ident()
        self._open_nothing()
        for p, label in labels.items():
            if p not in parameters and p.requires_grad:
                self._warn_once(
                    f"the gradient of {label!r}, of shape {tuple(p.shape)}, belongs to none "
                    f"of the {len(parameters)} named_parameters: it is reduced densely"
                )
        optimizer._groups = None  # they are for fusion in Horovod, which gets no tensors
        optimizer._allreduce_grad_async = self.hand_in
        optimizer.synchronize = self.synchronize
        optimizer.step = self._followed_step(optimizer)
        optimizer.register_load_state_dict_post_hook(weakly(self.give_up))

    @property
    def optimizer(self) -> Any:
        """Horovod's; None once it is gone."""
        return self._optimizer()

    @property
    def unit(self) -> float:
        """The loss scale that the gradients are in units of; 1 where there is none."""
        return 1.0 if self.fates.unit is None else self.fates.unit

    # -- in ----------------------------------------------------------------------------------------

    def first(
        self, parameter: Parameter, group: Sequence[Parameter], *, is_new: bool
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Hand in a gradient of which Horovod's own method will reduce what is returned here.

        That is so for an optimizer's first gradient only, by which it is found, or for the others
        of its first group. Other ranks may have another first one: they are told in the meeting.

        Args:
            parameter: Whose gradient.
            group: Those that Horovod reduces together with it; empty: it is alone.
            is_new: Whether it is the first of them.
        """
        (result, _), optimizer = self.hand_in(parameter), self.optimizer
        if is_new:
            label = self._entries[id(parameter)].label
            self._begun = [(label, GROUPED if group else SINGLE, max(1, len(group)))]
            for p, (handle, _) in optimizer._handles.items():
                if handle is not None:
                    entry = self._entries[id(p)]
                    entry.gradient, entry.reduced = p.grad, handle
                    self._handed.append(entry)
                    self._begun.append((entry.label, SPARSE, 1))
        elif not group:  # another thread's, at the same time
            self._begun.append((self._entries[id(parameter)].label, SINGLE, 1))
        return torch.zeros(1, dtype=torch.float32, device="cpu"), result

    def meet_early(self) -> None:
        """Meet before Horovod waits: its `synchronize` began before there was a door."""
        self._hand_in_the_rest()
        optimizer = self.optimizer
        optimizer._handles = Handles(optimizer._handles, self._end_early)
        self._meet()

    def _end_early(self) -> None:
        """Horovod's `synchronize` has put the gradients into their places."""
        self.optimizer._handles = {}
        self._end_step()

    def _hand_in_the_rest(self) -> None:
        """Gradients that did not come, in an order of their own."""
        needed = self.optimizer._requires_update
        if len(self._handed) == len(needed):
            return
        rest = (entry for p in needed if (entry := self._entries[id(p)]).gradient is None)
        for entry in sorted(rest, key=lambda entry: entry.label):
            self.hand_in(entry.parameter)

    def hand_in(self, parameter: Parameter) -> tuple[Callable[[], Tensor], None]:
        """Take a gradient, in the place of Horovod's `_allreduce_grad_async`."""
        entry = self._entries[id(parameter)]
        if self._is_open and entry.gradient is not None:  # a `synchronize` of Horovod's asks
            return entry.handle
        with self._session.lock:  # backward passes may run in several threads
            if not self._is_open:
                self._open_step()
                self._beat(brings_new=True)
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            entry.gradient, entry.version = gradient, gradient._version
            self._handed.append(entry)
            if len(self._samples) < SAMPLED_TENSORS and not gradient.is_sparse:
                self._samples.append((entry, _sample(gradient)))
            if not self._holds_back:
                self._pass_on(entry, gradient)
        return entry.handle

    def _open_step(self) -> None:
        """The step's first gradient is there, or `synchronize` was called without one."""
        optimizer = self.optimizer
        self.fates.refuse_closures(optimizer)
        self._follow_groups(optimizer)
        self.settle()
        if self.rewinds.seen():
            self._drop_residuals()
        self._session.raise_failure()  # Horovod, which has ended, too, would name nobody
        self._holds_back = not self._session.is_current() or self._session.begin_step()
        if not self._holds_back:
            self._engine.scale = self._scale()
            self._engine.begin_step()
        self._is_open = True

    def _beat(self, *, brings_new: bool) -> None:
        """Begin the step's pulse."""
        import horovod.torch as hvd

        process_set = self.optimizer.process_set
        place = process_set.rank() + 1.0
        beat = torch.tensor([1.0, place, float(brings_new)], dtype=torch.float32, device="cpu")
        self._pulse = hvd.allreduce_async_(
            beat, name=self._pulse_name, op=hvd.Sum, process_set=process_set
        )

    def _follow_groups(self, optimizer: Any) -> None:
        """Parameters and momenta may have changed since the last step.

        Raises:
            ConfigError: Momentum would be applied a second time, or another one.
            UnsupportedError: Horovod does not reduce all gradients.
        """
        groups = optimizer.param_groups
        needing = [p.requires_grad for group in groups for p in group["params"]]
        if needing != self._needing:
            refuse_unregistered(optimizer)
            self._needing = needing
        momenta = [(group.get("momentum"), group.get("betas")) for group in groups]
        if momenta != self._momenta:
            assignment = self._engine.assignment
            refuse_momenta(optimizer, self._parameters, assignment, self._dense_below)
            self._momenta = momenta

    def settle(self, call: str | None = None) -> None:
        """See what became of the last step's results; the residuals follow the loss scale.

        Args:
            call: The user's; None: the next step begins.
        """
        undone = self.fates.settle(call)
        if self._is_open:  # it has failed: nothing of it was given back
            undone.update(self._handed)
        self._engine.settle(counts=True, undone={e.name for e in undone if e.name is not None})
        factor = self.fates.rescaling()
        if factor != 1.0:
            self._engine.rescale(factor)
        self._engine.unit = self.unit

    def check_between_steps(self, call: str) -> None:
        """Refuse a call between `backward()` and `synchronize()`.

        Raises:
            ConfigError: It is one.
        """
        elsewhere = threading.get_ident() != self._thread
        is_within = self._is_open or (elsewhere and not self.fates.is_settled)  # or soon applied
        if is_within and self._engine.error is None:
            raise ConfigError(f"{call} must be called between steps, got a call within one")

    def give_up(self, *_: object) -> None:
        """Let go of a step that has failed, or that Horovod forgets as it loads a state."""
        if self._is_open:
            self.settle("load_state_dict()")
            self._close_step()
            if self._session.embeddings is not None:
                self._session.embeddings.give_up()

    def _drop_residuals(self) -> None:
        lost = self._engine.forget([name for name, _ in self._parameters])
        if lost:
            warn(
                "dropped the residuals, since optimizer.load_state_dict() went back to another "
                "state than that of the last step (load the compression's own state, too, where "
                f"it was saved): L1 norm {lost:g}"
            )

    def _pass_on(self, entry: Entry, gradient: Tensor) -> None:
        """Give a gradient to the engine, to the embeddings' exchange, or to Horovod."""
        engine, planning, name = self._engine, self._session.planning, entry.name
        if gradient.is_sparse:
            if not self.optimizer.sparse_as_dense:
                self._pass_on_sparse(entry, gradient)
                return
            gradient = gradient.to_dense()
        if name is None:
            self._reduce_densely(entry, gradient)
            return
        if planning is not None:
            planning.arrived(name)
        spec, is_frozen = entry.spec_of(gradient), not entry.parameter.requires_grad
        if engine.awaits(spec) or self._is_sparse(spec, gradient):
            values = gradient
            if is_frozen:  # Horovod reduces it all the same
                values = gradient.data.zero_()
            elif self._is_changed_in_place():
                values = gradient.data  # with a count of changes of its own
            engine.submit(spec, values, frozen=is_frozen)
            entry.is_followed = True
            return
        holds = (planning is not None and planning.holds) or is_frozen
        leftover = None if holds else engine.residuals.leftover(name)
        if leftover is not None:
            gradient = with_leftover(spec, gradient, leftover, engine)
            entry.is_followed = True
        self._reduce_densely(entry, gradient)

    def _is_sparse(self, spec: TensorSpec, gradient: Tensor) -> bool:
        if not is_large(gradient, self._engine, self._dense_below) or not self._engine.takes(spec):
            return False
        if not self._engine.expects(spec.name):
            self._warn_once(
                f"{spec.name!r} had no gradient in the first step: it is reduced densely"
            )
            return False
        return True

    def _reduce_densely(self, entry: Entry, gradient: Tensor) -> None:
        """Let Horovod reduce a gradient: contiguous, and not bfloat16, which it does not take."""
        import horovod.torch as hvd

        assert entry.gradient is not None
        dtype, flushed = entry.gradient.dtype, entry.name if entry.is_followed else None
        tensor = gradient.float() if gradient.dtype == torch.bfloat16 else gradient
        handle = self._allreduce(tensor.contiguous(), f"hvd_sparse.dense.{entry.label}")
        self._handles.append(handle)

        def reduced() -> Tensor:
            result: Tensor = hvd.synchronize(handle)
            if flushed is not None:
                self._engine.residuals.flushed(flushed)
            return result.to(dtype)

        entry.reduced = reduced

    def _pass_on_sparse(self, entry: Entry, gradient: Tensor) -> None:
        embeddings, p = self._session.embeddings, entry.parameter
        if embeddings is not None and embeddings.takes(p):
            embeddings.hand_in(p, gradient)
            entry.reduced = as_horovod_error()(lambda: embeddings.result(p, self._scale()))
        else:
            entry.reduced, _ = self.optimizer._sparse_allreduce_grad_async(p, entry.label)
        # Without a gradient in the first step it had a dense one: it is in the plan.
        if entry.name is not None and self._engine.planned and self._engine.expects(entry.name):
            zeros = torch.zeros_like(p, requires_grad=False)
            self._engine.submit(entry.spec_of(zeros), zeros, frozen=True)

    def _allreduce(self, tensor: Tensor, name: str | None) -> int:
        """Horovod's, as its own optimizer would call it: in place."""
        import horovod.torch as hvd

        optimizer = self.optimizer
        predivide = optimizer.gradient_predivide_factor if optimizer.op == hvd.Average else 1.0
        handle: int = hvd.allreduce_async_(
            tensor,
            name=name,
            op=optimizer.op,
            prescale_factor=1.0 / predivide,
            postscale_factor=predivide,
            process_set=optimizer.process_set,
        )
        return handle

    def _scale(self) -> float:
        """What Horovod multiplies sums over the ranks by: for an average, in two steps maybe."""
        import horovod.torch as hvd

        optimizer = self.optimizer
        if optimizer.op != self._op:
            refuse_operation(optimizer.op)
            self._op = optimizer.op
        return 1.0 / optimizer.process_set.size() if optimizer.op == hvd.Average else 1.0

    # -- out ---------------------------------------------------------------------------------------

    def _followed_step(self, optimizer: Any) -> types.MethodType:
        """Horovod's `step`, or what a scheduler has made of it; its end is seen, also by an error.

        It is a method of the optimizer's, as schedulers that wrap it demand.
        """
        door, scheduled, own = weakref.ref(self), vars(optimizer).get("step"), type(optimizer).step

        @functools.wraps(scheduled or own)
        def step(optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
            call = functools.partial(own, optimizer) if scheduled is None else scheduled
            alive = door()
            if alive is None or alive.optimizer is not optimizer:
                return call(*arguments, **keywords)
            try:
                result = call(*arguments, **keywords)
            finally:
                alive.fates.left_step()
            alive.rewinds.stepped()
            alive._engine.let_go()  # the optimizer has read the results in the gradients' place
            return result

        return types.MethodType(step, optimizer)

    def synchronize(self) -> None:
        """Give all gradients back, reduced, in the place of Horovod's `synchronize`."""
        self._thread = threading.get_ident()
        optimizer = self.optimizer
        if not optimizer.process_set.included():
            optimizer._synchronized = True
            return
        if not self._is_open:
            self._session.raise_failure()
            self._beat(brings_new=bool(optimizer._handles))
            if self._nobody_brings_new() and self._keep_what_is_there():
                self._tell_horovod()
                return
            with self._session.lock:
                self._open_step()
        self._hand_in_the_rest()
        self._reduce()
        with self._first_cause():
            for entry in self._handed:
                self._put_back(entry)
        self._end_step()
        self._tell_horovod()

    def _tell_horovod(self) -> None:
        """What its own `synchronize` ends with."""
        optimizer = self.optimizer
        passes = optimizer.backward_passes_per_step
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, passes)
        optimizer._handles.clear()
        optimizer._synchronized = True

    def _put_back(self, entry: Entry) -> None:
        """A parameter's reduced gradient becomes its gradient: the same object, as with Horovod."""
        gradient, result = entry.parameter.grad, self._result(entry)
        assert gradient is not None
        if not result.is_sparse and not gradient.is_sparse:
            gradient.set_(result)  # type: ignore[call-overload]
        elif gradient.is_sparse:
            gradient.zero_().add_(result if result.is_sparse else result.to_sparse())
        else:
            entry.parameter.grad = result

    def _reduce(self) -> None:
        """All gradients of this rank are there: wait until they are reduced."""
        self._is_reduced = True
        self._session.raise_failure()
        self._refuse_changes()
        if self._holds_back:
            self._meet()
        with self._first_cause():
            self._engine.plan()  # where there is none: all ranks are here
            if self._session.embeddings is not None:
                self._session.embeddings.launch()
            self._await_all()
            exchanged = next((entry.name for entry in self._handed if entry.reduced is None), None)
            if exchanged is not None:
                self._results = self._engine.results(exchanged)

    @contextmanager
    def _first_cause(self) -> Iterator[None]:
        """Where Horovod has failed, which names no rank, the exchange may know why."""
        from horovod.common.exceptions import HorovodInternalError

        try:
            yield
        except TransportError as error:
            raise horovod_error(error) from error
        except HorovodInternalError:
            until = time.monotonic() + CAUSE_S
            while time.monotonic() < until:
                self._session.raise_failure()
                time.sleep(CAUSE_INTERVAL_S)
            raise

    def _end_step(self) -> None:
        """The reduced gradients are in their places."""
        self.fates.give([entry for entry in self._handed if entry.is_followed])
        if self._session.planning is not None:
            self._session.planning.returned()
        self._close_step()

    def _meet(self) -> None:
        """All ranks are in this step's `synchronize`: what they have to agree on is agreed on."""
        optimizer, session = self.optimizer, self._session
        session.arrivals = [entry.name for entry in self._handed if entry.name is not None]
        if session.is_current():
            session.meet()
        else:
            session.connect(optimizer, self._parameters, self._device())
            self._warn_where_forgotten()
            self._begin_what_others_have_begun()
        self._engine.scale, self._engine.unit = self._scale(), self.unit
        self._engine.begin_step()
        self._holds_back = False
        for entry in self._handed:
            if entry.reduced is None and entry.gradient is not None:
                self._pass_on(entry, entry.gradient)

    def _begin_what_others_have_begun(self) -> None:
        """Horovod's own methods have taken the gradients that came before a door: here or there."""
        import horovod.torch as hvd

        optimizer = self.optimizer
        mine, self._begun = self._begun, []
        theirs = self._session.gather_objects(mine, "begun")
        by_label = {entry.label: entry for entry in self._entries.values()}
        for label, kind, count in sorted({each for rank in theirs for each in rank} - set(mine)):
            zeros = [torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(count)]
            if kind == GROUPED:
                self._others.append(
                    hvd.grouped_allreduce_async_(
                        zeros, name=label, op=optimizer.op, process_set=optimizer.process_set
                    )
                )
            elif kind == SINGLE:
                self._others.append(self._allreduce(zeros[0], label))
            else:
                entry = by_label[label]
                entry.reduced, _ = optimizer._sparse_allreduce_grad_async(entry.parameter, label)
        for handle, _ in optimizer._handles.values():
            if isinstance(handle, int):  # this rank's first gradients
                self._others.append(handle)

    def _nobody_brings_new(self) -> bool:
        """Whether every rank came to `synchronize` without a backward pass since the last one."""
        assert self._pulse is not None
        self._wait_for([self._pulse])
        return self._read_pulse() == 0 and self._session.is_current()

    def _wait_for(self, handles: list[int]) -> None:
        """Return once Horovod's `synchronize` would return at once for every one of the handles."""
        raise_failure = self._session.raise_failure
        pauses = Pauses(SPIN_S, SLEPT_SHARE, LONGEST_SLEEP_S)
        horovod_handles.wait_for(handles, raise_failure, pauses)
        raise_failure()  # Horovod may have ended because of it: this is the first cause

    def _read_pulse(self) -> float:
        """How many ranks bring new gradients.

        Raises:
            UnsupportedError: Not all ranks take part.
        """
        import horovod.torch as hvd

        pulse, self._pulse = self._pulse, None
        if pulse is None:
            return 0.0
        count, total, new = hvd.synchronize(pulse).tolist()
        size = self.optimizer.process_set.size()
        if (count, total) != (size, size * (size + 1) / 2):  # a rank has joined: it brings nothing
            error = UnsupportedError(
                "sparse gradients can be summed or averaged over all ranks of a process set, but "
                f"Horovod reduced [1, rank + 1] to [{count:g}, {total:g}] over {size} ranks: "
                "hvd.join() cannot be used"
            )
            self._engine.fail(error)
            raise error
        return float(new)

    def _keep_what_is_there(self) -> bool:
        """Reduce what is reduced already, as Horovod would: false where ranks differ in it."""
        optimizer = self.optimizer
        parameters = sorted(optimizer._requires_update, key=optimizer._parameter_names.get)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        mine = [None if g.is_sparse else _digest(g) for g in gradients]
        theirs = self._session.gather_objects(mine, "kept")
        if any(None in each or each != theirs[0] for each in theirs):
            return False
        factor = self._scale() * len(theirs)
        for gradient in gradients if factor != 1.0 else ():
            gradient.mul_(factor)
        return True

    def _refuse_changes(self) -> None:
        """Check that gradients are what they were when they were handed in.

        Raises:
            UnsupportedError: The script has changed one in place since.
        """
        changed = [
            entry
            for entry in self._handed
            if (gradient := entry.gradient) is not None
            and gradient._version != entry.version
            and entry.parameter.grad is gradient
        ]
        if not self._is_changed_in_place():
            changed += [e for e, bits in self._samples if self._has_other_bits(e, bits)]
        if changed:
            error = UnsupportedError(
                f"the gradient of {changed[0].label!r} was changed after backward(), as by "
                "clipping or scaler.unscale_(), while it was being reduced: call "
                "optimizer.synchronize() before, and step() under optimizer.skip_synchronize()"
            )
            self._engine.fail(error)
            raise error

    def _is_changed_in_place(self) -> bool:
        """Whether the engine changes gradients: by clipping, or by the units of `SparseAdamW`."""
        clips = isinstance(self._engine.assignment, WithDense)
        return clips or isinstance(self.optimizer, SparseAdamW)

    def _has_other_bits(self, entry: Entry, bits: Tensor) -> bool:
        """A loss scaler changes gradients without a count; Horovod reduces its own in place."""
        gradient = entry.gradient
        if gradient is None or entry.parameter.grad is not gradient or entry.reduced is not None:
            return False
        return entry.parameter.requires_grad and not torch.equal(_sample(gradient), bits)

    def _await_all(self) -> None:
        """Sleep until every exchange is done.

        The exchanges come first: a thread wakes this one when they are done. Horovod tells nobody,
        and has to be looked at, which takes the processor and Python's lock from the exchanges.
        """
        import horovod.torch as hvd

        handles = [*self._handles, *self._others]
        if self._pulse is not None:
            handles.append(self._pulse)
        while not self._engine.wait(LOOK_S) and not all(map(hvd.poll, handles)):
            pass  # where Horovod is done first, it may know why: a rank that has joined, say
        self._wait_for(handles)
        self._read_pulse()
        for handle in self._others:
            hvd.synchronize(handle)

    def _result(self, entry: Entry) -> Tensor:
        """A parameter's reduced gradient."""
        if not self._is_reduced:  # Horovod's `synchronize` began before there was a door
            self._reduce()
        parameter, gradient = entry.parameter, entry.parameter.grad
        if entry.reduced is not None:
            result = entry.reduced()
        else:
            assert entry.name is not None
            result = self._results[entry.name]
        if result.is_sparse or parameter.is_contiguous():
            return result
        assert gradient is not None
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter)
        return gradient.copy_(result)  # an optimizer reads both in the order of their memory

    def _device(self) -> torch.device | None:
        """Where the gradients are that the engine exchanges; None where there are none."""
        large = (p for _, p in self._parameters if is_large(p, self._engine, self._dense_below))
        return next((p.device for p in large), None)

    def _warn_where_forgotten(self) -> None:
        from hvd_sparse.adapter.elastic import is_forgotten

        if is_forgotten(self.optimizer._compression):
            self._warn_once(
                "hvd.elastic restores the weights without the residuals, which then hold what the "
                "repeated steps bring again: pass TorchState(..., compression=compression)"
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(f"hvd_sparse: {message}", stacklevel=3)

    def _close_step(self) -> None:
        for entry in self._handed:
            entry.gradient, entry.reduced, entry.is_followed = None, None, False
        self._open_nothing()

    def _open_nothing(self) -> None:
        self._handed: list[Entry] = []
        self._samples: list[tuple[Entry, Tensor]] = []
        self._handles: list[int] = []  # Horovod's, of dense gradients
        self._others: list[int] = []
        self._pulse, self._results = None, {}
        self._is_open = self._holds_back = self._is_reduced = False


def is_large(tensor: Tensor, engine: Engine, dense_below: int) -> bool:
    """Whether a tensor's type and size allow for a sparse exchange."""
    least = 1 if isinstance(engine.assignment, WithDense) else max(1, dense_below)
    return tensor.dtype in SPARSE_DTYPES and tensor.numel() >= least


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
    # What a rank with nothing left hands to Horovod, too.
    return together.half() if gradient.dtype == torch.float16 else together


def _sample(gradient: Tensor) -> Tensor:
    """Some of a gradient's bits."""
    flat = gradient.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED_ENTRIES)].clone().view(torch.uint8)


def _digest(gradient: Tensor) -> int:
    """Two gradients with the same number are equal, as good as certainly."""
    flat = gradient.detach().to("cpu").contiguous().view(-1)
    return crc32(flat.view(torch.uint8).numpy().tobytes())
