"""What became of each reduced gradient: a step applied it, it is still there, or it was dropped.

* A gradient counts that a torch optimizer's `step` has applied.
* It counts, too, where it is still in `p.grad` when the next one comes: it is input once more.
* It was dropped where it is there no more, or has become zero, where a loss scaler skipped the
  step, or where a step of rate 0 has left no trace. What it took out of the residual then goes
  back, for this parameter alone.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from hvd_sparse.adapter.binding import (
    SAMPLED_ENTRIES,
    SAMPLED_TENSORS,
    Entry,
    any_of,
    any_of_each,
    callers,
    told,
)
from hvd_sparse.adapter.divergence import digest
from hvd_sparse.errors import ConfigError, UnsupportedError, warn
from hvd_sparse.optim import parameters_of

SEARCHED_FRAMES = 17
"""From an optimizer's hook up to the loss scaler that called its `step`."""

PATIENCE_STEPS = 3
"""Steps whose gradients nobody applies, while weights move, before a warning says so."""


class Fates:
    """Follows the reduced gradients that an optimizer or a model was given back.

    Args:
        entries: Its parameters by their `id`.
        corrects_momentum: Whether the last gradient of a parameter of this name came out of
            momentum correction.
        giver: The user's call that gives reduced gradients back.

    Attributes:
        unit: The loss scale that residuals are multiplied by; None while no scaler is known.
        scaler: The last that has called a step, weakly.
    """

    def __init__(
        self,
        entries: Mapping[int, Entry],
        corrects_momentum: Callable[[str | None], bool] = lambda _: False,
        giver: str = "optimizer.synchronize()",
    ) -> None:
        self._entries, self._corrects_momentum, self._giver = entries, corrects_momentum, giver
        self._given: dict[int, Entry] = {}
        self._pass = -1  # the last one that was looked at
        self._corrected: dict[int, Entry] = {}  # of what was applied: it has momentum in it
        self._repeated: Entry | None = None  # of them, one that a pass has added to
        self._undone: set[Entry] = set()
        self._taken_back: dict[int, Entry] = {}
        self._call: str | None = None
        self._has_stepped = False
        self.scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self.unit: float | None = None
        self._stepping: weakref.ref[Any] | None = None
        self._to_apply: set[int] = set()
        self._reductions_inside: int | None = None  # a step with a closure, which has begun

    def give(self, entries: Iterable[Entry]) -> None:
        """The reduced gradients of these are in their `.grad` from now on."""
        for entry in entries:
            p = entry.parameter
            entry.given, entry.held = p.grad, None
            entry.version = 0 if p.grad is None else p.grad._version
            entry.view = None if p.grad is None else TensorWeakRef(p.grad)
            entry.idle_steps += 1
            if entry.idle_steps == PATIENCE_STEPS:
                entry.weights = digest(p)
            self._given[id(p)] = entry
        if self._stepping is not None and self._reductions_inside is None:
            self._to_apply.update(self._given)
        if self._stepping is None or self._reductions_inside is not None:
            self._watch()

    def leave_what_is_kept(self) -> None:
        """What was a gradient in the last step keeps its values."""
        for entry in self._entries.values():
            kept = None if entry.lent is None else entry.lent()
            if kept is not None and kept is not entry.parameter.grad:
                kept.set_(kept.clone())  # the next result takes the place of the last one
                entry.lent = None

    def holds_any(self) -> bool:
        """Whether something that was given back is still there, and was not applied."""
        return any(map(self._is_there, self._given.values()))

    def drop(self, entries: Iterable[Entry]) -> None:
        """The reduced gradients of these went nowhere."""
        self._undone.update(entries)

    def settle(self, call: str | None = None, optimizers: Iterable[Any] = ()) -> set[Entry]:
        """Which of them have gone back since this was last asked, or go back now.

        Args:
            call: The user's, before which all must be applied, or never is; None: the next step
                begins, with what still is in `p.grad`.
            optimizers: Those that were met; what none of them has is not applied yet.

        Raises:
            ConfigError: The step that begins adds to gradients that were taken back.
            UnsupportedError: It adds to gradients that have their momentum already.
        """
        if call is None and self._taken_back:
            held = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
            there = {key: e for key, e in self._taken_back.items() if self._is_there(e)}
            if any(not held or key in held for key in there):
                self._refuse_late()
            self._taken_back = there
        gone = {
            key: entry
            for key, entry in self._given.items()
            if call is not None or not self._is_there(entry)
        }
        if call is None:
            kept = (e for key, e in self._given.items() if key not in gone and not e.was_zero)
            self.refuse_momentum_again(kept)
            self._corrected.clear()
            self._warn_of_updates_by_hand(gone)
            for entry in gone.values():
                entry.given = None
        self._given.clear()
        self._undone.update(gone.values())
        if call is not None and gone:
            sent = {key: entry for key, entry in gone.items() if not entry.was_zero}
            self._taken_back, self._call = self._taken_back | sent, call
        undone, self._undone = self._undone, set()
        return undone

    def refuse_momentum_again(self, kept: Iterable[Entry]) -> None:
        """Refuse to reduce what was given back, and is still there, with momentum once more."""
        for entry in kept:
            if self._corrects_momentum(entry.name):
                raise UnsupportedError(
                    f"the reduced gradient of {entry.label!r}, in which the compression's momentum "
                    "is already, would be reduced again: call step() and zero_grad() before the "
                    "next backward pass, and let only the last of several passes reduce, by "
                    "model.no_sync() or backward_passes_per_step"
                )

    def _warn_of_updates_by_hand(self, gone: Mapping[int, Entry]) -> None:
        """Weights have moved twice without a step; a scaler that skips steps leaves them alone."""
        is_moving = False
        for key, entry in self._given.items():
            if entry.weights is None:
                continue
            moved = key in gone and not torch.equal(digest(entry.parameter), entry.weights)
            is_late = entry.idle_steps > PATIENCE_STEPS
            is_moving = is_moving or (moved and is_late)
            if is_late or not moved:
                entry.weights = None
        if is_moving and self.scaler is None:
            warn(
                "weights have changed, but no optimizer.step() applied the reduced gradients: they "
                "are taken for dropped, and sent once more; call compression.applied() after each "
                "update by hand"
            )

    def applied(self) -> None:
        """The script has applied by hand what was given back."""
        for entry in self._given.values():
            entry.given, entry.idle_steps, entry.weights = None, 0, None
        self._given.clear()
        self._has_stepped = True

    @property
    def is_settled(self) -> bool:
        """Whether all that was given back was applied or dropped."""
        return not self._given

    def left_step(self) -> None:
        """The optimizer's `step` has ended, maybe by an error."""
        self._stepping = self._reductions_inside = None
        self._to_apply.clear()
        self._watch()

    def left_failed_step(self) -> None:
        """A backward pass begins: within a step there is none without a closure."""
        if self._stepping is not None and self._reductions_inside is None:
            self.left_step()

    def before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Before each `step`; Horovod's begins twice, in its own class and in that of torch."""
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        self._stepping = weakref.ref(optimizer)
        self._reductions_inside = None if closure is None else 0
        repeated = self._repeated
        if repeated is not None and any(p is repeated.parameter for p in parameters_of(optimizer)):
            self.refuse_momentum_again([repeated] if _holds(repeated) else [])
        if closure is None:
            self._to_apply |= self._found_in(optimizer)
        self.look_for_scaler(optimizer)

    def _found_in(self, optimizer: Any) -> set[int]:
        """What a step is about to apply: what was given back, or was made of it, and is not 0."""
        keys = (self._given.keys() | self._taken_back.keys()) - self._to_apply
        unknown = {key for key in keys if self._entries[key].given is not None}
        if not unknown:
            return set()
        found = [p for p in parameters_of(optimizer) if id(p) in unknown and p.grad is not None]
        flags = told(any_of_each([p.grad for p in found if p.grad is not None]))
        kept = {id(p) for p, flag in zip(found, flags, strict=True) if flag}
        waiting = {id(p) for p in found if self._entries[id(p)].was_zero}
        sent = (entry.parameter.grad for entry in self._given.values() if entry.held)
        if not kept and any(g is not None and not any_of(g) for g in sent):  # they were zeroed
            waiting = {key for key in waiting if self._is_as_given(self._entries[key])}
        return kept | waiting

    def _is_there(self, entry: Entry) -> bool:
        """Whether what was given back, or what was made of it, is what a backward pass adds to."""
        gradient, given = entry.parameter.grad, entry.given
        if gradient is None or given is None:
            return False
        if any_of(gradient):
            return gradient is given or not bool(((gradient != 0) & (given == 0)).any())
        if not entry.was_zero:
            return False
        if self._is_as_given(entry):
            return True
        # The others tell whether it has been zeroed with them.
        left = [e for e in self._given.values() if not e.was_zero and e.given is not None]
        return any(map(_holds, left))

    def _is_as_given(self, entry: Entry) -> bool:
        """Whether nobody has zeroed its zeros, also not by `.data`, as far as others tell."""
        left = [e.given for e in self._given.values() if e.held and is_unchanged(e)]
        return is_unchanged(entry) and all(any_of(each) for each in left if each is not None)

    def refuse_closures(self, *, reduces_before: bool) -> None:
        """A reduction begins: in a step with a closure only one that the closure waits for.

        Args:
            reduces_before: Whether a step reduces gradients before it calls its closure.

        Raises:
            UnsupportedError: The optimizer would apply what is not reduced, or reduce twice.
        """
        if self._reductions_inside is None:
            return
        self._reductions_inside += 1
        if reduces_before:
            raise UnsupportedError(
                "optimizer.step(closure) would apply gradients that are not reduced, since Horovod "
                "synchronizes before it calls the closure: call optimizer.synchronize() at the end "
                "of the closure, and step(closure) under optimizer.skip_synchronize()"
            )
        if self._reductions_inside > 1 and not self.holds_any():
            raise UnsupportedError(
                "optimizer.step(closure) called its closure more than once, as LBFGS does: one "
                "step cannot send parts of two gradients; use an optimizer that calls it once"
            )

    def is_unscaled(self, optimizer: Any) -> bool:
        """Whether a loss scaler has divided the optimizer's gradients, and not updated since."""
        known = None if self.scaler is None else self.scaler()
        states = getattr(known or calling_scaler(), "_per_optimizer_states", {})
        stage = states.get(id(optimizer), {}).get("stage", OptState.READY)
        return stage is not OptState.READY

    def forget_taken_back(self) -> None:
        """A state is loaded, or a world begins: what is there may be input once more."""
        self._taken_back.clear()
        self._corrected.clear()
        self._repeated = None

    def rescaling(self) -> float:
        """What the loss scale has been multiplied by since this was last asked."""
        scaler = None if self.scaler is None else self.scaler()
        if scaler is None or self.unit is None:
            return 1.0
        before, self.unit = self.unit, scaler.get_scale() or self.unit  # 0 once it has underflowed
        return self.unit / before

    def _watch(self) -> None:
        """Look at what was given before a backward pass adds to it: it may have been set to zero.

        Scripts that call `step` alone need no such look: it has decided by then.
        """
        pairs = [(e, e.given) for e in self._given.values()]
        pairs += [(e, e.parameter.grad) for e in self._corrected.values()]
        new = {entry: g for entry, g in pairs if entry.held is None and g is not None}
        for entry, flag in zip(new, any_of_each(list(new.values())), strict=True):
            entry.held = flag
        for key, entry in (self._given | self._corrected).items():
            if not entry.is_watched and entry.parameter.requires_grad:
                entry.is_watched = True
                hook = entry.parameter.register_hook(weakly(self._look, key))
                weakref.finalize(self, hook.remove).atexit = False

    def _look(self, key: int) -> None:
        entry, task = self._entries[key], torch._C._current_graph_task_id()
        if self._given and task != self._pass:  # a pass that has added nothing yet: all can tell
            self._pass, given = task, list(self._given.values())
            for each, is_there in zip(given, list(map(self._is_there, given)), strict=True):
                each.given = each.parameter.grad if is_there else None  # or a copy of it
        if (key in self._corrected and not entry.was_zero) or entry is self._repeated:
            self._repeated = entry if is_left(entry) else None
            if self._repeated is None:  # what comes next are sums of the script's own
                self._corrected.clear()
        if key in self._taken_back and not self._is_there(entry):
            del self._taken_back[key]

    def after_step(self, optimizer: Any) -> None:
        """After the `step` of any optimizer: one that this one wraps may share its parameters.

        Raises:
            ConfigError: It has applied what was taken back.
        """
        stepping, is_known = self._stepping, self._reductions_inside is None
        applied = self._to_apply if stepping is not None and is_known else self._found_in(optimizer)
        if stepping is not None and stepping() is optimizer:
            self._stepping, self._reductions_inside, self._to_apply = None, None, set()
        found_inf = getattr(optimizer, "found_inf", None)  # a scaler's word to a fused optimizer
        if not applied or (isinstance(found_inf, Tensor) and bool(found_inf)):
            return
        for group in optimizer.param_groups:
            is_still = _is_zero(group.get("lr"))
            for p in group["params"]:
                if id(p) not in applied:
                    continue
                entry = self._given.get(id(p))
                if id(p) in self._taken_back:
                    self._refuse_late()
                elif entry is not None and (not is_still or self._leaves_traces(optimizer, entry)):
                    del self._given[id(p)]
                    if self._corrects_momentum(entry.name):
                        self._corrected[id(p)] = entry
                    entry.given, entry.weights, entry.idle_steps = None, None, 0
                    self._has_stepped = True
        for entry in self._given.values():
            given = entry.given
            if given is not None and entry.was_zero and entry.parameter.grad is given:
                entry.version = given._version  # a clipped zero is one; zeroing comes later

    def _leaves_traces(self, optimizer: Any, entry: Entry) -> bool:
        """Whether a step of rate 0 has changed something: a state or a momentum."""
        inner = getattr(optimizer, "optim", optimizer)  # a ZeroRedundancyOptimizer's
        states = getattr(inner, "state", {}).values()  # of any parameter: some share them out
        kept = (each for s in states for each in (s.values() if isinstance(s, dict) else [s]))
        return self._corrects_momentum(entry.name) or any(each is not None for each in kept)

    def _refuse_late(self) -> None:
        self._taken_back.clear()
        raise ConfigError(
            f"{self._call} must be called between steps, got a call after "
            f"{self._giver}, whose results were applied only then"
        )

    def look_for_scaler(self, optimizer: Any) -> None:
        """Find one that is new here among the callers of `step`; it has not updated its scale yet.

        Residuals of another unit follow in the next step: one later than they should.

        Raises:
            ConfigError: A scaler has called the steps before, and none has called this one.
        """
        known = None if self.scaler is None else self.scaler()
        if id(optimizer) in getattr(known, "_per_optimizer_states", ()):  # none has a disabled one
            return
        scaler, before = calling_scaler(), self.unit
        if scaler is None:
            applies = self._given if self._reductions_inside is not None else self._to_apply
            if self.scaler is not None and before != 1.0 and applies:
                raise ConfigError(
                    f"the residuals are in units of a loss scale of {before:g}, but no GradScaler "
                    "called this step: to go on without one, call compression.rescale(1 / scale) "
                    "before the first backward pass"
                )
            return
        scale = scaler.get_scale()
        if before is None:
            self.unit, before = scale, 1.0 if self._has_stepped else scale
        if before != scale:
            warn(
                f"the residuals are in units of a loss scale of {before:g}, but a new scaler began "
                f"with {scale:g}: keep one scaler, and load its state, too"
            )
        self.scaler = weakref.ref(scaler)


class Rewinds:
    """Sees that an optimizer goes back, by `load_state_dict`, to what it was before.

    Its weights then are others than the last step has left: a sample of the largest tensors tells.
    """

    def __init__(self) -> None:
        self._sampled: Sequence[Tensor] = ()
        self._is_loaded = False
        self._left: list[Tensor] | None = None

    def follow(self, optimizer: Any) -> None:
        """Look at this optimizer from now on."""
        self._left = None
        moving = [p for p in parameters_of(optimizer) if p.requires_grad and p.numel()]
        self._sampled = sorted(moving, key=torch.numel)[-SAMPLED_TENSORS:]
        optimizer.register_load_state_dict_post_hook(weakly(self._loaded))

    def seen(self) -> bool:
        """Whether a state was loaded, and weights are other ones, since the last step."""
        is_due, self._is_loaded = self._is_loaded, False
        return is_due and self.have_moved()

    def have_moved(self) -> bool:
        """Whether weights are other ones since the last step."""
        if self._left is None:
            return False
        pairs = zip(self._left, self._sampled, strict=True)
        return not all(torch.equal(left, sample(p)) for left, p in pairs)

    def stepped(self) -> None:
        """The optimizer has done a step; Horovod's by zeros, after a state was loaded, is none."""
        gradients = (p.grad for p in self._sampled) if self._is_loaded else ()
        if not self._is_loaded or any(g is not None and bool(any_of(g)) for g in gradients):
            self._left = list(map(sample, self._sampled))

    def _loaded(self) -> None:
        self._is_loaded = True


def sample(parameter: Tensor) -> Tensor:
    """A copy of some elements: torch does not count what is changed by `.data`."""
    n = min(parameter.numel(), SAMPLED_ENTRIES)
    return parameter.detach().as_strided((n,), (parameter.numel() // max(n, 1),)).clone()


def _holds(entry: Entry) -> bool:
    """Whether a parameter's gradient is not all zeros now."""
    gradient = entry.parameter.grad
    return gradient is not None and bool(any_of(gradient))


def is_left(entry: Entry) -> bool:
    """Whether a gradient is the object that was given back last, and not all zeros."""
    given = None if entry.view is None else entry.view()
    return given is not None and given is entry.parameter.grad and _holds(entry)


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is 0; one on a device is not waited for."""
    if isinstance(rate, Tensor):
        return rate.device.type == "cpu" and rate.numel() == 1 and float(rate) == 0
    return isinstance(rate, int | float) and rate == 0


def is_unchanged(entry: Entry) -> bool:
    """Whether the gradient is the one that was given back, by torch's count of changes, too."""
    given = entry.given
    return given is not None and entry.parameter.grad is given and given._version == entry.version


def calling_scaler() -> torch.amp.GradScaler | None:
    """The loss scaler among a step's callers.

    No other frame's variables are looked at: until Python 3.12 a frame keeps what was seen of them,
    so that an optimizer which its caller has let go of would stay.
    """
    kinds: list[type] = [torch.amp.GradScaler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    steps = [inspect.unwrap(vars(k)["step"]).__code__ for k in kinds if "step" in vars(k)]
    for frame in callers(SEARCHED_FRAMES):
        if frame.f_code in steps:
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler):
                return scaler
    return None


def weakly(method: Callable[..., None], *bound: Any) -> Callable[..., None]:
    """A hook that calls a method with what is `bound`, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def hook(*_: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*bound)

    return hook  # type: ignore[no-any-return]
