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
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from hvd_sparse.adapter.binding import (
    SAMPLED_ENTRIES,
    SAMPLED_TENSORS,
    Entry,
    Parameters,
    told,
)
from hvd_sparse.adapter.entrance import LOOK_S, Entrance, by_kind, is_part, is_shared
from hvd_sparse.adapter.fate import Fates, is_left, weakly
from hvd_sparse.adapter.refusals import refuse_operation, refuse_unregistered
from hvd_sparse.adapter.session import Session
from hvd_sparse.errors import ConfigError, UnsupportedError
from hvd_sparse.leaving import PROCESS_END
from hvd_sparse.optim import parameters_of
from hvd_sparse.transports import waiting
from hvd_sparse.transports.waiting import SPIN_S, Pauses

FUSED_NUMEL = 1 << 16
"""Dense gradients of fewer elements are reduced together, at the end of backward."""
USED_NAMES = (
    *("_allreduce_grad_async", "_handles", "_requires_update", "_parameter_names", "_groups"),
    *("_should_synchronize", "_synchronized", "_allreduce_delay", "_sparse_allreduce_grad_async"),
    *("backward_passes_per_step", "gradient_predivide_factor", "op", "process_set"),
)
"""What of Horovod's optimizer is used, beside `synchronize`, `step` and the hooks of torch's."""

SLEPT_SHARE, LONGEST_SLEEP_S = 0.1, 2e-3
"""As Pauses has them, but longer: every look wakes this thread on a core that Horovod's may need. A
dense step of a small transformer, 2 ranks on 2 cores, takes 0.94 of plain Horovod's time with these
(3 launches: 0.93 to 0.94), and took 1.06 to 1.13 with sleeps of a fifth."""

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


class Door(Entrance):
    """One Horovod optimizer's gradients on their way to the engine or to Horovod, and back."""

    def __init__(self, optimizer: Any, parameters: Parameters, session: Session) -> None:
        for name in USED_NAMES:
            if not hasattr(optimizer, name):
                raise UnsupportedError(
                    f"Horovod's optimizer has no {name!r}: this package knows Horovod 0.28.1"
                )
        labels = optimizer._parameter_names
        self._entries = {id(p): Entry(p, n, parameters.name_of(p)) for p, n in labels.items()}
        for entry in self._entries.values():
            entry.handle = functools.partial(self._in_place, entry), None
        fates = Fates(self._entries, session.engine.corrects_momentum)
        mine = [self._entries[id(p)] for p in parameters_of(optimizer) if p in labels]
        super().__init__(parameters, session, fates, mine, optimizer)
        self._meet_optimizer(optimizer)
        self._needing: list[tuple[int, bool]] = []
        self._op: Any = None
        self._begun: tuple[object, list[tuple[str, str, int]]] = (None, [])  # in which world
        self._pulse: int | None
        self._results: Mapping[str, Tensor]
        own = sorted(entry.label for entry in mine)
        self._pulse_name = f"hvd_sparse.step.{crc32(repr(own).encode()):08x}"
        self._open_nothing()
        self._warn_of_strangers(mine)
        optimizer._groups = None  # they are for fusion in Horovod, which gets no tensors
        optimizer._allreduce_grad_async = self.hand_in
        if "synchronize" not in vars(optimizer):  # else it is the script's, and calls Horovod's
            optimizer.synchronize = torch.compiler.disable(self.synchronize)
        optimizer.step = self._followed_step(optimizer)
        optimizer.register_load_state_dict_post_hook(weakly(self.give_up))

    @property
    @override
    def optimizer(self) -> Any:
        """Horovod's; None once it is gone."""
        return self._served()

    @property
    @override
    def group(self) -> Any:
        return self.optimizer.process_set

    @override
    def _follows(self, optimizer: Any) -> bool:
        """Horovod's, and those of the class that it has wrapped."""
        own = self._served()
        return own is not None and isinstance(optimizer, type(own).__bases__)

    @override
    def _ends_passes(self, optimizer: Any) -> bool:
        return optimizer is self._served()

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
            PROCESS_END.add(self._session)  # which tells one world from the next
            mine = [(label, GROUPED if group else SINGLE, max(1, len(group)))]
            self._begun = self._session.framework.world(), mine
            for p, (handle, _) in optimizer._handles.items():
                if handle is not None:
                    entry = self._entries[id(p)]
                    entry.gradient, entry.reduced = p.grad, handle
                    entry.version = p.grad._version
                    self._handed.append(entry)
                    mine.append((entry.label, SPARSE, 1))
        elif not group:  # another thread's, at the same time
            self._begun[1].append((self._entries[id(parameter)].label, SINGLE, 1))
        return torch.zeros(1, dtype=torch.float32, device="cpu"), result

    def meet_early(self) -> None:
        """Meet before Horovod waits: its `synchronize` began before there was a door."""
        for entry in self._handed:
            entry.is_by_hand = not entry.is_made
        self._hand_in_the_rest()
        self._end_with_horovod()
        self._meet()

    def _end_with_horovod(self) -> None:
        """Horovod's own `synchronize` is under way: where it ends, the step does."""
        optimizer = self.optimizer
        if not isinstance(optimizer._handles, Handles):
            optimizer._handles = Handles(optimizer._handles, self._end_early)

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
            entry.is_by_hand = not entry.is_made

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
            entry.is_made, entry.is_by_hand = gradient is None, False
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            elif gradient.is_inference():  # it could not be changed later
                gradient = parameter.grad = gradient.clone()
            entry.gradient, entry.version = gradient, gradient._version
            self._handed.append(entry)
            few = len(self._samples) < SAMPLED_TENSORS
            if not gradient.is_sparse and (few or is_part(gradient)):
                self._samples.append((entry, _sample(gradient)))
            if not self._holds_back:
                self._pass_on(entry, gradient)
        return entry.handle

    @override
    def _open_step(self, *, before_closure: bool = False) -> None:
        """The step's first gradient is there, or `synchronize` was called without one."""
        optimizer = self.optimizer
        if not before_closure:
            self.fates.refuse_closures(reduces_before=optimizer._should_synchronize)
        self._follow_groups(optimizer)
        super()._open_step()

    def _beat(self, *, brings_new: bool) -> None:
        """Begin the step's pulse."""
        import horovod.torch as hvd

        process_set = self.optimizer.process_set
        place = process_set.rank() + 1.0
        beat = torch.tensor([1.0, place, float(brings_new)], dtype=torch.float64, device="cpu")
        self._pulse = hvd.allreduce_async_(
            beat, name=self._pulse_name, op=hvd.Sum, process_set=process_set
        )

    def _follow_groups(self, optimizer: Any) -> None:
        """Parameters and momenta may have changed since the last step: refuse what cannot be."""
        groups = optimizer.param_groups
        needing = [(id(p), p.requires_grad) for group in groups for p in group["params"]]
        if needing != self._needing:
            refuse_unregistered(optimizer)
            self._needing = needing
            held, mine = {key for key, _ in needing}, optimizer._requires_update
            gone = (self._entries[id(p)] for p in mine if p.requires_grad and id(p) not in held)
            self._warn_of_unheld(list(gone))
        self._follow_momenta(optimizer)

    @override
    def _pass_on(self, entry: Entry, gradient: Tensor) -> None:
        if gradient.is_sparse and self.optimizer.sparse_as_dense:
            gradient = gradient.to_dense()
        super()._pass_on(entry, gradient)

    @override
    def _give_to_framework(self, entry: Entry, gradient: Tensor) -> None:
        """Let Horovod reduce a gradient: now, or where it is small, together with others."""
        if gradient.is_sparse:
            gather = self.optimizer._sparse_allreduce_grad_async
            entry.reduced, _ = gather(entry.parameter, entry.label)
            return
        if gradient.dtype == torch.bfloat16:  # which Horovod does not take
            gradient = gradient.float()
        if gradient.numel() < FUSED_NUMEL:
            self._small.append((entry, gradient))
            entry.reduced = lambda: gradient  # it is Horovod's; `_begin_small` says how it ends
        else:
            self._give_to_horovod([(entry, gradient)])

    def _begin_small(self) -> None:
        """One allreduce for all of a type and a device.

        Horovod's threads look at every name that they know, and on a GPU without NCCL it copies
        each tensor to the host inside the hook.
        """
        for parts in by_kind(sorted(self._small, key=lambda each: each[0].label)):
            self._give_to_horovod(parts)
        self._small.clear()

    def _give_to_horovod(self, parts: Sequence[tuple[Entry, Tensor]]) -> None:
        """Begin to reduce gradients of one type."""
        import horovod.torch as hvd

        # By `.data`, with a count of changes of its own: on a GPU without NCCL, Horovod counts.
        flat = [gradient.data.contiguous().view(-1) for _, gradient in parts]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0]
        handle = self._allreduce(whole, f"hvd_sparse.dense.{parts[0][0].label}")
        self._handles.append(handle)
        finish = functools.cache(functools.partial(hvd.synchronize, handle))

        def reduced(entry: Entry, gradient: Tensor, value: Tensor) -> Tensor:
            finish()
            if entry.is_followed and entry.name is not None:
                self._engine.residuals.flushed(entry.name)
            own = entry.parameter if entry.gradient is None else entry.gradient
            return value.view(gradient.shape).to(own.dtype)

        values = whole.split([each.numel() for each in flat])
        for part, value in zip(parts, values, strict=True):
            part[0].reduced = functools.partial(reduced, *part, value)

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

    @override
    def scale(self) -> float:
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
            alive._engine.let_go()  # the optimizer has read the results in the gradients' place
            return result

        return types.MethodType(step, optimizer)

    @torch.inference_mode(mode=False)  # in which no tensor that is made could be changed later
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
                self._open_step(before_closure=optimizer._should_synchronize)
        self._hand_in_the_rest()
        self._reduce()
        with self._first_cause():
            for entry in self._handed:
                self._put_back(entry, self._result(entry))
        self._end_step()
        self._tell_horovod()

    def _tell_horovod(self) -> None:
        """What its own `synchronize` ends with."""
        optimizer = self.optimizer
        passes = optimizer.backward_passes_per_step
        optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, passes)
        optimizer._handles.clear()
        optimizer._synchronized = True

    def _in_place(self, entry: Entry) -> Tensor:
        """What Horovod's own `synchronize` is to put into a gradient's place: it is there already.

        Horovod would cut a view off from its buffer.
        """
        result, gradient = self._result(entry), entry.parameter.grad
        if gradient is None or gradient.is_sparse or result.is_sparse:
            return result
        self._put_back(entry, result)
        return gradient

    def _put_back(self, entry: Entry, result: Tensor) -> None:
        """A parameter's reduced gradient becomes its gradient: the same object, as with Horovod."""
        gradient = entry.parameter.grad
        if gradient is None:
            raise ConfigError(
                f"the gradient of {entry.label!r} is gone: zero_grad() must not come between "
                "backward() and step()"
            )
        if not result.is_sparse and not gradient.is_sparse:
            if result.data_ptr() == gradient.data_ptr():
                pass  # it was reduced in place
            elif entry.is_by_hand or is_shared(gradient, 1 + entry.has_alias):
                # Others find the result there, too, or write the next gradient by its address.
                gradient.copy_(result)
            else:
                entry.lend(result)
        elif gradient.is_sparse:
            gradient.zero_().add_(result if result.is_sparse else result.to_sparse())
        else:
            entry.parameter.grad = result

    def _reduce(self) -> None:
        """All gradients of this rank are there: wait until they are reduced."""
        self._is_reduced = True
        self._session.raise_failure()
        self._refuse_changes()
        if self._session.is_current() and (self._holds_back or not self._engine.planned):
            self._await_pulse()  # a rank that has joined would not meet the others
        if self._holds_back:
            self._meet()
        with self._first_cause():
            self._begin_small()
            self._engine.plan()  # where there is none: all ranks are here
            if self._session.embeddings is not None:
                self._session.embeddings.launch()
            self._await_all()
            self._results = self._engine_results()

    def _end_step(self) -> None:
        """The reduced gradients are in their places."""
        self.fates.give([entry for entry in self._handed if entry.is_followed])
        if self._session.planning is not None:
            self._session.planning.returned()
        self._close_step()

    @override
    def _connect(self) -> None:
        trained = parameters_of(self.optimizer)
        self._session.connect(self.group, trained, self._parameters, self._device())
        self._warn_where_forgotten()
        self._begin_what_others_have_begun()

    def _begin_what_others_have_begun(self) -> None:
        """Horovod's own methods have taken the gradients that came before a door: here or there."""
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        optimizer = self.optimizer
        (world, mine), self._begun = self._begun, (None, [])
        if world is not self._session.framework.world():
            mine = []  # it has ended, before the ranks had met
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
            if handle in mpi_ops._handle_map:  # this rank's first gradients, not yet waited for
                self._others.append(handle)

    def _nobody_brings_new(self) -> bool:
        """Whether every rank came to `synchronize` without a backward pass since the last one.

        Without a plan, as after a state was loaded, it is a step like any other.
        """
        is_new = self._await_pulse()
        return not is_new and self._session.is_current() and self._engine.planned

    def _await_pulse(self) -> float:
        """What `_read_pulse` returns. Peers may wait for an exchange that begins only then."""
        self._wait_for([] if self._pulse is None else [self._pulse])
        return self._read_pulse()

    def _wait_for(self, handles: list[int]) -> None:
        """Return once Horovod's `synchronize` would return at once for every one of the handles."""
        raise_failure = self._session.raise_failure
        pauses = Pauses(SPIN_S, SLEPT_SHARE, LONGEST_SLEEP_S)
        waiting.wait_for(handles, raise_failure, pauses)
        raise_failure()  # Horovod may have ended because of it: this is the first cause

    def _read_pulse(self) -> float:
        """How many ranks bring new gradients; UnsupportedError where not all take part."""
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
        """Reduce what is reduced already, as Horovod would: false where ranks differ in it.

        False, too, where nothing waits to be applied and a reduction clips, or has momentum, which
        goes on without gradients.

        Raises:
            UnsupportedError: What is there was applied, and has its momentum already.
        """
        optimizer, engine = self.optimizer, self._engine
        parameters = sorted(optimizer._requires_update, key=optimizer._parameter_names.get)
        corrected = [e for e in self._entries.values() if engine.corrects_momentum(e.name)]
        goes_on = bool(corrected or self._changes_in_place) and not self.fates.holds_any()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        mine = [None if goes_on or g.is_sparse else _digest(g) for g in gradients]
        theirs = self._session.gather_objects(mine, "kept")
        if goes_on:
            self.fates.refuse_momentum_again(filter(self._is_as_given, corrected))
        if any(None in each or each != theirs[0] for each in theirs):
            return False
        factor = self.scale() * len(theirs)
        for gradient in gradients if factor != 1.0 else ():
            gradient.mul_(factor)
        return True

    def _is_as_given(self, entry: Entry) -> bool:
        """Whether a gradient is still the one that was given back, and not 0."""
        gradient = entry.parameter.grad
        return gradient is not None and gradient._version == entry.version and is_left(entry)

    def _refuse_changes(self) -> None:
        """Raise UnsupportedError where a gradient was changed since it was handed in."""
        changed = [
            entry
            for entry in self._handed
            if (gradient := entry.gradient) is not None
            and gradient._version != entry.version
            and not is_part(gradient)  # parts count the changes of each other, too
            and entry.parameter.grad is gradient
        ]
        if not self._changes_in_place:
            changed += self._with_other_bits()
        elif self._handed and self.fates.is_unscaled(self.optimizer):
            changed += self._handed[:1]
        if changed:
            error = UnsupportedError(
                f"the gradient of {changed[0].label!r} was changed after backward(), as by "
                "clipping or scaler.unscale_(), while it was being reduced: call "
                "optimizer.synchronize() before, and step() under optimizer.skip_synchronize()"
            )
            self._engine.fail(error)
            raise error

    def _with_other_bits(self) -> list[Entry]:
        """A loss scaler changes gradients without a count; Horovod reduces its own in place."""
        entries, flags = [], []
        for entry, bits in self._samples:
            gradient, p = entry.gradient, entry.parameter
            if gradient is None or p.grad is not gradient or entry.reduced is not None:
                continue
            if p.requires_grad:
                entries.append(entry)
                flags.append((_sample(gradient) != bits).any())
        return [entry for entry, flag in zip(entries, told(flags), strict=True) if flag]

    def _await_all(self) -> None:
        """Sleep until every exchange is done.

        The exchanges come first: a thread wakes this one when they are done. Horovod tells nobody,
        and has to be looked at, which takes the processor and Python's lock from the exchanges.
        """
        import horovod.torch as hvd

        handles = self._under_way()
        while not self._engine.wait(LOOK_S) and not all(map(hvd.poll, handles)):
            pass  # where Horovod is done first, it may know why: a rank that has joined, say
        with self._session.waiting:
            self._wait_for(handles)
        self._read_pulse()
        for handle in self._others:
            hvd.synchronize(handle)

    def _under_way(self) -> list[int]:
        """Horovod's handles of this step."""
        pulse = [] if self._pulse is None else [self._pulse]
        return [*self._handles, *self._others, *pulse]

    @override
    def give_up(self, call: str | None = "load_state_dict()") -> None:
        handles, engine = self._under_way(), self._engine
        super().give_up(call)
        with suppress(ValueError):  # one that has failed is cleared already
            if not self._is_recovering():  # their names come again
                with self._session.waiting:
                    waiting.wait_for(handles, lambda: engine.error is not None)

    def _result(self, entry: Entry) -> Tensor:
        """A parameter's reduced gradient."""
        if not self._is_reduced:  # Horovod's `synchronize` began before there was a door
            self._end_with_horovod()
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

    def _warn_where_forgotten(self) -> None:
        from hvd_sparse.adapter.elastic import is_forgotten

        if is_forgotten(self.optimizer._compression):
            self._warn_once(
                "hvd.elastic restores the weights without the residuals, which then hold what the "
                "repeated steps bring again: pass TorchState(..., compression=compression)"
            )

    @override
    def _open_nothing(self) -> None:
        super()._open_nothing()
        self._samples: list[tuple[Entry, Tensor]] = []
        self._small: list[tuple[Entry, Tensor]] = []  # dense, for one allreduce
        self._handles: list[int] = []  # Horovod's, of dense gradients
        self._others: list[int] = []
        self._pulse, self._results = None, {}
        self._is_reduced = False


def _sample(gradient: Tensor) -> Tensor:
    """Some of a gradient's bits."""
    flat = gradient.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED_ENTRIES)].clone().view(torch.uint8)


def _digest(gradient: Tensor) -> int:
    """Two gradients with the same number are equal, as good as certainly."""
    flat = gradient.detach().to("cpu").contiguous().view(-1)
    return crc32(flat.view(torch.uint8).numpy().tobytes())
