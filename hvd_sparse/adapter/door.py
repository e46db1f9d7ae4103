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

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from hvd_sparse.adapter.binding import SPARSE_DTYPES, Parameters
from hvd_sparse.adapter.fate import Fates, Rewinds, weakly
from hvd_sparse.adapter.handover import refuse_momenta
from hvd_sparse.adapter.refusals import (
    Registered,
    refuse_join,
    refuse_operation,
)
from hvd_sparse.adapter.session import Session, as_horovod_error, horovod_error
from hvd_sparse.adapter.waiting import LOOK_S, await_cause, wait_for
from hvd_sparse.engine import Engine, TensorSpec, WithDense
from hvd_sparse.errors import ConfigError, TransportError, UnsupportedError, warn

USED_NAMES = (
    *("_allreduce_grad_async", "_handles", "_requires_update", "_parameter_names", "_groups"),
    *("_should_synchronize", "_synchronized", "_allreduce_delay", "_sparse_allreduce_grad_async"),
    *("backward_passes_per_step", "gradient_predivide_factor", "op", "process_set"),
)
"""What of Horovod's optimizer is used, beside `synchronize`, `step` and the hooks of torch's."""


SINGLE, GROUPED, SPARSE = "single", "grouped", "sparse"
"""How Horovod's own method has begun to reduce a gradient before there was a door."""


@dataclass(frozen=True)
class Dense:
    """A gradient that Horovod reduces.

    Attributes:
        handle: Horovod's.
        dtype: Type in which it is to be given back.
        flushed: The parameter's name, where some of its residual was added to the gradient.
    """

    handle: int
    dtype: torch.dtype
    flushed: str | None = None


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
        self.fates = Fates(optimizer)
        self.rewinds = Rewinds(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._parameters, self._engine, self._session = parameters, engine, session
        self._registered = Registered(optimizer)
        self._dense_below = dense_below
        self._momenta: list[tuple[Any, Any]] = []
        self._warned: set[str] = set()
        self._is_open = self._holds_back = self._is_reduced = False
        self._thread = threading.get_ident()
        self._early: set[Parameter] = set()
        self._handed: dict[Parameter, tuple[Tensor, int]] = {}
        self._submitted: dict[Parameter, str] = {}
        self._dense: dict[Parameter, Dense] = {}
        self._gathered: dict[Parameter, Callable[[], Tensor]] = {}
        self._begun_elsewhere: list[tuple[str, str, int]] = []
        self._others: list[int] = []
        self._pulse: int | None = None
        names = sorted(optimizer._parameter_names.values())
        self._pulse_name = f"hvd_sparse.step.{crc32(repr(names).encode()):08x}"
        for parameter, name in optimizer._parameter_names.items():
            if parameter not in parameters and parameter.requires_grad:
                self._warn_once(
                    f"the gradient of {name!r}, of shape {tuple(parameter.shape)}, belongs to none "
                    f"of the {len(parameters)} named_parameters: it is reduced densely"
                )
        optimizer._groups = None  # they are for fusion in Horovod, which gets no tensors
        optimizer._allreduce_grad_async = self.hand_in
        optimizer.synchronize = self.synchronize
        optimizer.register_step_pre_hook(weakly(self._end_step))
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
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Hand in a gradient of which Horovod's own method will reduce what is returned here.

        That is so for an optimizer's first gradient only, by which it is found, or for the others
        of its first group. Other ranks may have another first one: they are told in the meeting.

        Args:
            parameter: Whose gradient.
            group: Those that Horovod reduces together with it; empty: it is alone.
            is_new: Whether it is the first of them.
        """
        result, _ = self.hand_in(parameter)
        if is_new:
            kind = GROUPED if group else SINGLE
            name = self.optimizer._parameter_names[parameter]
            self._begun_elsewhere.append((name, kind, max(1, len(group))))
        return torch.zeros(1, dtype=torch.float32, device="cpu"), lambda _: result()

    def meet_early(self) -> None:
        """Meet before Horovod waits: its `synchronize` began before there was a door."""
        for parameter in self._rest():
            self.hand_in(parameter)
            self._early.add(parameter)
        optimizer = self.optimizer
        optimizer._handles = Handles(optimizer._handles, self._end_early)
        self._meet()

    def _end_early(self) -> None:
        """Horovod's `synchronize` has put the gradients into their places."""
        self.optimizer._handles = {}
        self._end_step()

    def _rest(self) -> list[Parameter]:
        """The parameters whose gradients did not come, in an order of their own."""
        optimizer = self.optimizer
        rest = optimizer._requires_update - self._handed.keys() - set(_with_handles(optimizer))
        return sorted(rest, key=optimizer._parameter_names.__getitem__)

    def hand_in(self, parameter: Parameter) -> tuple[Callable[[], Tensor], None]:
        """Take a gradient, in the place of Horovod's `_allreduce_grad_async`."""
        if parameter in self._early:
            self._early.discard(parameter)
            return partial(self._result, parameter), None
        if not self._is_open:
            with self._session.lock:
                self._open_step()
            self._beat(brings_new=True)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        self._handed[parameter] = gradient, gradient._version
        if not self._holds_back:
            self._pass_on(parameter, gradient)
        return partial(self._result, parameter), None

    def _open_step(self) -> None:
        """The step's first gradient is there, or `synchronize` was called without one."""
        optimizer = self.optimizer
        self.fates.refuse_closures(optimizer)
        self._registered.refuse_others()
        self._follow_momenta(optimizer)
        self.settle()
        if self.rewinds.seen():
            self._drop_residuals()
        self._engine.unit = self.unit
        if self._session.is_current():
            self._session.raise_failure()  # Horovod, which has ended, too, would name nobody
        self._holds_back = not self._session.is_current() or self._session.begin_step()
        if not self._holds_back:
            self._engine.scale = self._scale()
            self._engine.begin_step()
        self._is_open = True

    def _beat(self, *, brings_new: bool) -> None:
        """Begin the step's pulse."""
        import horovod.torch as hvd

        optimizer = self.optimizer
        place = optimizer.process_set.rank() + 1.0
        beat = torch.tensor([1.0, place, float(brings_new)], dtype=torch.float32, device="cpu")
        self._pulse = hvd.allreduce_async_(
            beat, name=self._pulse_name, op=hvd.Sum, process_set=optimizer.process_set
        )

    def _follow_momenta(self, optimizer: Any) -> None:
        """A schedule may have changed them since the last step.

        Raises:
            ConfigError: Momentum would be applied a second time, or another one.
        """
        momenta = [(g.get("momentum"), g.get("betas")) for g in optimizer.param_groups]
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
        names = {name for p in undone if (name := self._parameters.name_of(p)) is not None}
        self._engine.settle(counts=True, undone=names)
        factor = self.fates.rescaling()
        if factor != 1.0:
            self._engine.rescale(factor)

    def check_between_steps(self, call: str) -> None:
        """Refuse a call between `backward()` and `synchronize()`.

        Raises:
            ConfigError: It is one.
        """
        elsewhere = (
            threading.get_ident() != self._thread
        )  # where results may be about to be applied
        is_within = self._is_open or (elsewhere and not self.fates.is_settled)
        if is_within and self._engine.error is None:
            raise ConfigError(f"{call} must be called between steps, got a call within one")

    def give_up(self, *_: object) -> None:
        """Let go of a step that has failed, or that Horovod forgets as it loads a state."""
        if self._is_open:
            self.settle("load_state_dict()")
            self._close_step()

    def _drop_residuals(self) -> None:
        lost = self._engine.forget([name for name, _ in self._parameters])
        if lost:
            warn(
                "dropped the residuals, since optimizer.load_state_dict() went back to another "
                "state than that of the last step (load the compression's own state, too, where "
                f"it was saved): L1 norm {lost:g}"
            )

    def _pass_on(self, parameter: Parameter, gradient: Tensor) -> None:
        """Give a gradient to the engine, to the embeddings' exchange, or to Horovod."""
        engine, planning = self._engine, self._session.planning
        if gradient.is_sparse:
            if not self.optimizer.sparse_as_dense:
                self._pass_on_sparse(parameter, gradient)
                self._fill_its_place(parameter)
                return
            gradient = gradient.to_dense()
        name = self._parameters.name_of(parameter)
        if name is None:
            self._reduce_densely(parameter, gradient)
            return
        if planning is not None:
            planning.arrived(name)
        spec = self._parameters.spec_of(parameter, gradient)
        if engine.awaits(spec) or self._is_sparse(spec, gradient):
            frozen = not parameter.requires_grad  # Horovod reduces it all the same
            values = gradient.data  # with a count of changes of its own: clipping is in place
            engine.submit(spec, values.zero_() if frozen else values, frozen=frozen)
            self._submitted[parameter] = name
            return
        holds = (planning is not None and planning.holds) or not parameter.requires_grad
        leftover = None if holds else engine.residuals.leftover(name)
        if leftover is None:
            self._reduce_densely(parameter, gradient)
        else:
            self._reduce_densely(parameter, with_leftover(spec, gradient, leftover, engine), name)

    def _is_sparse(self, spec: TensorSpec, gradient: Tensor) -> bool:
        if not is_large(gradient, self._engine, self._dense_below) or not self._engine.takes(spec):
            return False
        if not self._engine.expects(spec.name):
            self._warn_once(
                f"{spec.name!r} had no gradient in the first step: it is reduced densely"
            )
            return False
        return True

    def _reduce_densely(
        self, parameter: Parameter, gradient: Tensor, flushed: str | None = None
    ) -> None:
        """Let Horovod reduce a gradient: contiguous, and not bfloat16, which it does not take."""
        tensor = gradient.float() if gradient.dtype == torch.bfloat16 else gradient
        name = f"hvd_sparse.dense.{self.optimizer._parameter_names.get(parameter)}"
        handle = self._allreduce(tensor.contiguous(), name)
        assert parameter.grad is not None
        self._dense[parameter] = Dense(handle, parameter.grad.dtype, flushed)

    def _pass_on_sparse(self, parameter: Parameter, gradient: Tensor) -> None:
        embeddings = self._session.embeddings
        if embeddings is not None and embeddings.takes(parameter):
            embeddings.hand_in(parameter, gradient)
            return
        name = self.optimizer._parameter_names.get(parameter)
        gathered, _ = self.optimizer._sparse_allreduce_grad_async(parameter, name)
        self._gathered[parameter] = gathered

    def _fill_its_place(self, parameter: Parameter) -> None:
        """An embedding without a gradient in the first step had a dense one: it is in the plan."""
        name = self._parameters.name_of(parameter)
        if name is not None and self._engine.planned and self._engine.expects(name):
            zeros = torch.zeros_like(parameter, requires_grad=False)
            self._engine.submit(self._parameters.spec_of(parameter, zeros), zeros, frozen=True)

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
        refuse_operation(optimizer.op)
        return 1.0 / optimizer.process_set.size() if optimizer.op == hvd.Average else 1.0

    # -- out ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Give all gradients back, reduced, in the place of Horovod's `synchronize`."""
        self._thread = threading.get_ident()
        optimizer = self.optimizer
        horovods = type(optimizer).synchronize
        if not optimizer.process_set.included():
            horovods(optimizer)
            return
        if not self._is_open:
            if self._session.is_current():
                self._session.raise_failure()
            self._beat(brings_new=bool(optimizer._handles))
            if self._nobody_brings_new() and self._keep_what_is_there():
                return
            with self._session.lock:
                self._open_step()
        for parameter in self._rest():
            optimizer._handles[parameter] = self.hand_in(parameter)
        self._reduce()
        with self._first_cause():
            horovods(optimizer)
        self._end_step()

    def _reduce(self) -> None:
        """All gradients of this rank are there: wait until they are reduced."""
        self._is_reduced = True
        self._refuse_changes()
        if self._holds_back:
            self._meet()
        if self._session.embeddings is not None:
            self._session.embeddings.launch()
        with self._first_cause():
            self._await_all()

    @contextmanager
    def _first_cause(self) -> Iterator[None]:
        """Where Horovod has failed, which names no rank, the exchange may know why."""
        from horovod.common.exceptions import HorovodInternalError

        try:
            yield
        except HorovodInternalError:
            await_cause(self._session.raise_failure)
            raise

    def _end_step(self, *_: object) -> None:
        """The reduced gradients are in their places."""
        if not self._is_reduced:
            return
        flushed = (p for p, dense in self._dense.items() if dense.flushed is not None)
        self.fates.give([*self._submitted, *flushed])  # nothing waits of the others
        if self._session.planning is not None:
            self._session.planning.returned()
        self._close_step()

    def _meet(self) -> None:
        """All ranks are in this step's `synchronize`: what they have to agree on is agreed on."""
        optimizer, session = self.optimizer, self._session
        if session.is_current():
            session.meet()
        else:
            session.connect(optimizer, self._parameters, self._device())
            self._warn_where_forgotten()
            self._begin_what_others_have_begun()
        self._engine.scale, self._engine.unit = self._scale(), self.unit
        self._engine.begin_step()
        self._holds_back = False
        for parameter, (gradient, _) in self._handed.items():
            self._pass_on(parameter, gradient)

    def _begin_what_others_have_begun(self) -> None:
        """Horovod's own methods have taken the gradients that came before a door: here or there."""
        import horovod.torch as hvd

        optimizer = self.optimizer
        before = set(_with_handles(optimizer)) - self._handed.keys()
        names = optimizer._parameter_names
        mine = [*self._begun_elsewhere, *((names[p], SPARSE, 1) for p in before)]
        theirs = self._session.gather_objects(mine, "begun")
        by_name = {name: p for p, name in names.items()}
        for name, kind, count in sorted({each for rank in theirs for each in rank} - set(mine)):
            zeros = [torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(count)]
            if kind == GROUPED:
                self._others.append(
                    hvd.grouped_allreduce_async_(
                        zeros, name=name, op=optimizer.op, process_set=optimizer.process_set
                    )
                )
            elif kind == SINGLE:
                self._others.append(self._allreduce(zeros[0], name))
            else:
                handle = optimizer._sparse_allreduce_grad_async(by_name[name], name)
                optimizer._handles[by_name[name]] = handle
                del self._handed[by_name[name]]
        self._begun_elsewhere.clear()

    def _nobody_brings_new(self) -> bool:
        """Whether every rank came to `synchronize` without a backward pass since the last one."""
        assert self._pulse is not None
        wait_for([self._pulse], self._session.raise_failure)
        return self._read_pulse() == 0 and self._session.is_current()

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
        try:
            refuse_join(count, total, self.optimizer.process_set.size())
        except UnsupportedError as error:
            self._engine.fail(error)
            raise
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
        self.fates.refresh()
        for parameter in parameters:
            optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
        optimizer._handles.clear()
        optimizer._synchronized = True
        return True

    def _refuse_changes(self) -> None:
        """Check that gradients are what they were when they were handed in.

        Raises:
            UnsupportedError: The script has changed one in place since.
        """
        for parameter, (gradient, version) in self._handed.items():
            if gradient._version != version and parameter.grad is gradient:
                error = UnsupportedError(
                    f"the gradient of {self.optimizer._parameter_names.get(parameter)!r} was "
                    "changed after backward(), as by clipping or scaler.unscale_(), while it was "
                    "being reduced: call optimizer.synchronize() before, and step() under "
                    "optimizer.skip_synchronize()"
                )
                self._engine.fail(error)
                raise error

    def _await_all(self) -> None:
        """Sleep until every exchange is done.

        The exchanges come first: a thread wakes this one when they are done. Horovod tells nobody,
        and has to be looked at, which takes the processor and Python's lock from the exchanges.
        """
        import horovod.torch as hvd

        pulse = [] if self._pulse is None else [self._pulse]
        handles = [*pulse, *(dense.handle for dense in self._dense.values()), *self._others]
        while not self._engine.wait(LOOK_S) and not all(map(hvd.poll, handles)):
            pass  # where Horovod is done first, it may know why: a rank that has joined, say
        wait_for(handles, self._session.raise_failure)
        self._read_pulse()
        for handle in self._others:
            hvd.synchronize(handle)

    def _result(self, parameter: Parameter) -> Tensor:
        """A parameter's reduced gradient, which Horovod puts into `p.grad`."""
        import horovod.torch as hvd

        if not self._is_reduced:  # Horovod's `synchronize` began before there was a door
            self._reduce()
        gradient = parameter.grad
        assert gradient is not None
        name = self._submitted.get(parameter)
        if name is not None:
            result = self._exchanged(name, parameter.shape)
        elif parameter in self._dense:
            dense = self._dense[parameter]
            result = hvd.synchronize(dense.handle).to(dense.dtype)
            if dense.flushed is not None:
                self._engine.residuals.flushed(dense.flushed)
        elif parameter in self._gathered:
            result = self._gathered[parameter]()
        else:
            assert self._session.embeddings is not None
            with as_horovod_error():
                result = self._session.embeddings.result(parameter, self._scale())
        if result.is_sparse or parameter.is_contiguous():
            return result
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter)
        return gradient.copy_(result)  # an optimizer reads both in the order of their memory

    def _exchanged(self, name: str, shape: torch.Size) -> Tensor:
        try:
            result = self._engine.result(name)
        except TransportError as error:
            raise horovod_error(error) from error
        if result.shape != shape:
            raise RuntimeError(f"{name}: shape {tuple(result.shape)} is not {tuple(shape)}")
        return result

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
        self._handed, self._submitted, self._dense, self._gathered = {}, {}, {}, {}
        self._others, self._pulse, self._begun_elsewhere, self._early = [], None, [], set()
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


def _digest(gradient: Tensor) -> int:
    """Two gradients with the same number are equal, as good as certainly."""
    flat = gradient.detach().to("cpu").contiguous().view(-1)
    return crc32(flat.view(torch.uint8).numpy().tobytes())


def _with_handles(optimizer: Any) -> Iterator[Parameter]:
    """The parameters whose gradients are on their way."""
    for key, (handle, _) in optimizer._handles.items():
        if handle is not None:
            yield from key if isinstance(key, tuple) else (key,)
