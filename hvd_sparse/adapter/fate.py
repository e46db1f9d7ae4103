"""What became of each reduced gradient: a step applied it, it is still there, or it was dropped.

* A gradient counts that a torch optimizer's `step` has applied.
* It counts, too, where it is still in `p.grad` when the next one comes: it is input once more.
* It was dropped where it is there no more, or zero, where a loss scaler skipped the step, or where
  a step of rate 0 has left no trace. What it took out of the residual then goes back, for this
  parameter alone.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_sparse.errors import ConfigError, UnsupportedError

SCALERS_FILE = torch.amp.GradScaler.step.__code__.co_filename
SEARCHED_FRAMES = 16
"""From an optimizer's hook up to the loss scaler that called its `step`."""

PATIENCE_STEPS = 3
"""Steps whose gradients nobody applies, while weights move, before a warning says so."""


class Given(NamedTuple):
    """A reduced gradient that was given back.

    Attributes:
        gradient: The object in `p.grad`.
        version: Torch's count of its changes.
        weights: That of the parameter.
    """

    gradient: Tensor
    version: int
    weights: int

    def is_there(self, parameter: Tensor) -> bool:
        """Whether it still is what the next backward pass adds to."""
        gradient = parameter.grad
        if gradient is not self.gradient:
            return False
        return gradient._version == self.version or bool(gradient.any())


class Fates:
    """Follows the gradients that one of Horovod's optimizers was given back.

    Args:
        optimizer: Horovod's.

    Attributes:
        unit: The loss scale that residuals are multiplied by; None while no scaler is known.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._given: dict[Parameter, Given] = {}
        self._undone: set[Parameter] = set()
        self._taken_back: dict[Parameter, Given] = {}
        self._call: str | None = None
        self._watched: set[Parameter] = set()
        self._idle_steps: int | None = 0  # None: an optimizer has stepped
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self.unit: float | None = None
        self._in_step = False
        self._reductions_inside: int | None = None  # a step with a closure, which has begun
        optimizer.register_step_pre_hook(self._before_step)
        after_step = weakly(self._after_step)
        hook = register_optimizer_step_post_hook(after_step)
        weakref.finalize(self, hook.remove).atexit = False

    def give(self, parameters: Iterable[Parameter]) -> None:
        """The reduced gradients of these are in their `.grad` from now on."""
        for p in parameters:
            gradient = p.grad
            assert gradient is not None
            self._given[p] = Given(gradient, gradient._version, p._version)
            if p.requires_grad and not self._in_step and p not in self._watched:
                self._watch(p)

    def refresh(self) -> None:
        """What was given back was multiplied, and still is what was given back."""
        for p, given in self._given.items():
            if p.grad is given.gradient:
                self._given[p] = given._replace(version=given.gradient._version)

    def settle(self, call: str | None = None) -> set[Parameter]:
        """Which of them have gone back since this was last asked, or go back now.

        Args:
            call: The user's, before which all must be applied, or never is; None: the next step
                begins, with what still is in `p.grad`.

        Raises:
            ConfigError: The step that begins adds to gradients that were taken back.
        """
        for p, given in self._taken_back.items() if call is None else ():
            if given.is_there(p):
                self._refuse_late()
        moved = 0
        self._taken_back = {} if call is None else self._taken_back
        for p, given in self._given.items():
            if call is None and given.is_there(p):
                continue
            self._undone.add(p)
            moved += p._version != given.weights
            if call is not None:
                self._taken_back[p], self._call = given, call
        self._given.clear()
        if moved and call is None and self._idle_steps is not None:
            self._idle_steps += 1
            if self._idle_steps == PATIENCE_STEPS:
                warnings.warn(
                    "hvd_sparse: weights have changed, but no optimizer.step() applied the reduced "
                    "gradients: they are taken for dropped, and sent once more",
                    stacklevel=2,
                )
        undone, self._undone = self._undone, set()
        return undone

    @property
    def is_settled(self) -> bool:
        """Whether all that was given back was applied or dropped."""
        return not self._given

    def refuse_closures(self, optimizer: Any) -> None:
        """A reduction begins: in a step with a closure only one that the closure waits for.

        Raises:
            UnsupportedError: The optimizer would apply what is not reduced, or reduce twice.
        """
        if self._reductions_inside is None:
            return
        self._reductions_inside += 1
        if optimizer._should_synchronize:
            raise UnsupportedError(
                "optimizer.step(closure) would apply gradients that are not reduced, since Horovod "
                "synchronizes before it calls the closure: call optimizer.synchronize() at the end "
                "of the closure, and step(closure) under optimizer.skip_synchronize()"
            )
        if self._reductions_inside > 1:
            raise UnsupportedError(
                "optimizer.step(closure) called its closure more than once, as LBFGS does: one "
                "step cannot send parts of two gradients; use an optimizer that calls it once"
            )

    def rescaling(self) -> float:
        """What the loss scale has been multiplied by since this was last asked."""
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None or self.unit is None:
            return 1.0
        before, self.unit = self.unit, scaler.get_scale()
        return self.unit / before

    def _watch(self, parameter: Parameter) -> None:
        """Look at a gradient before a backward pass adds to it: it may have been set to zero.

        Scripts that call `step` alone need no such look: it has decided by then.
        """
        our_fates, watched = weakref.ref(self), weakref.ref(parameter)

        def look(_: Tensor) -> None:
            fates, p = our_fates(), watched()
            if fates is None or p is None:
                return
            given = fates._given.get(p)
            if given is not None and not given.is_there(p):
                del fates._given[p]
                fates._undone.add(p)
            taken_back = fates._taken_back.get(p)
            if taken_back is not None and not taken_back.is_there(p):
                del fates._taken_back[p]

        self._watched.add(parameter)
        hook = parameter.register_hook(look)
        weakref.finalize(self, hook.remove).atexit = False

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Pre-step hook; runs for Horovod's `step`, and again for the wrapped one."""
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        self._in_step, self._reductions_inside = True, None if closure is None else 0

    def _after_step(self, optimizer: Any) -> None:
        """Post-step hook of every optimizer: one that this one wraps may share its parameters.

        Raises:
            ConfigError: It has applied what was taken back.
        """
        if optimizer is self._optimizer():
            self._look_for_scaler()
            self._in_step, self._reductions_inside = False, None
        if not self._given and not self._taken_back:
            return  # Horovod's step, after the wrapped one, or a step of somebody else's
        found_inf = getattr(optimizer, "found_inf", None)  # a scaler's word to a fused optimizer
        skipped = isinstance(found_inf, Tensor) and bool(found_inf)
        zeroed = self._zeroed()
        for group in optimizer.param_groups:
            is_still = _is_zero(group.get("lr"))
            for p in group["params"]:
                given = self._given.get(p)
                if given is not None and p.grad is given.gradient:
                    del self._given[p]
                    if skipped or p in zeroed or (is_still and self._leaves_no_trace(optimizer, p)):
                        self._undone.add(p)
                    else:
                        self._idle_steps = None
                elif self._taken_back and not skipped and self._was_taken_back(p):
                    self._refuse_late()

    def _zeroed(self) -> set[Parameter]:
        """The parameters whose gradients were set to zero since they were given back."""
        changed = [
            (p, given.gradient)
            for p, given in self._given.items()
            if given.gradient._version != given.version and p.grad is given.gradient
        ]
        if not changed:
            return set()
        norms = torch._foreach_norm([gradient for _, gradient in changed], math.inf)
        largest = torch.stack([norm.to("cpu", torch.float64) for norm in norms])
        return {p for (p, _), norm in zip(changed, largest.tolist(), strict=True) if norm == 0}

    def _leaves_no_trace(self, optimizer: Any, parameter: Parameter) -> bool:
        """Whether a step of rate 0 has changed nothing: neither a state nor a momentum."""
        own = self._optimizer()
        corrected = own is not None and own._compression.corrects_momentum(parameter)
        return not optimizer.state.get(parameter) and not corrected

    def _was_taken_back(self, parameter: Parameter) -> bool:
        given = self._taken_back.get(parameter)
        return given is not None and parameter.grad is given.gradient

    def _refuse_late(self) -> None:
        self._taken_back.clear()
        raise ConfigError(
            f"{self._call} must be called between steps, got a call after "
            "optimizer.synchronize(), whose results were applied only then"
        )

    def _look_for_scaler(self) -> None:
        """Find it among the callers of `step`; it has not updated its scale yet.

        Residuals of another unit follow in the next step: one later than they should.

        No other frame's variables are looked at: until Python 3.12 a frame keeps what was seen of
        them, so that an optimizer which its caller has let go of would stay.
        """
        frame = sys._getframe(1)
        for _ in range(SEARCHED_FRAMES):
            is_scalers = frame.f_code.co_filename == SCALERS_FILE
            candidate = frame.f_locals.get("self") if is_scalers else None
            if isinstance(candidate, torch.amp.GradScaler):
                if self._scaler is None or self._scaler() is not candidate:
                    self._take(candidate)
                return
            if frame.f_back is None:
                return
            frame = frame.f_back

    def _take(self, scaler: torch.amp.GradScaler) -> None:
        """Follow a scaler that is new here."""
        scale = scaler.get_scale()
        if self.unit is None:
            self.unit = scale
        elif self.unit != scale:
            warnings.warn(
                f"hvd_sparse: the residuals are in units of a loss scale of {self.unit:g}, but a "
                f"new scaler began with {scale:g}: keep one scaler, and load its state, too",
                stacklevel=2,
            )
        self._scaler = weakref.ref(scaler)


class Rewinds:
    """Sees that an optimizer goes back, by `load_state_dict`, to what it was before.

    Args:
        optimizer: Horovod's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._is_loaded = False
        self._changes_at_step: int | None = None
        optimizer.register_load_state_dict_post_hook(weakly(self._loaded))
        optimizer.register_step_post_hook(weakly(self._stepped))

    def seen(self) -> bool:
        """Whether a state was loaded, and weights were set, since the last step or question."""
        is_loaded, self._is_loaded = self._is_loaded, False
        return is_loaded and self._changes_at_step not in (None, self._changes())

    def forgive(self) -> None:
        """The compression's own state goes along: before or after the optimizer's."""
        self._is_loaded, self._changes_at_step = False, None

    def _changes(self) -> int:
        return sum([p._version for p in self._parameters])

    def _loaded(self, optimizer: Any) -> None:
        self._is_loaded = True

    def _stepped(self, optimizer: Any) -> None:
        self._changes_at_step = self._changes()


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is 0; one on a device is not waited for."""
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return False
    return rate is not None and float(rate) == 0


def weakly(method: Callable[[Any], None]) -> Callable[..., None]:
    """A hook of an optimizer that does not keep the method's object alive."""
    reference = weakref.WeakMethod(method)

    def hook(optimizer: Any, *_: object) -> None:
        alive = reference()
        if alive is not None:
            alive(optimizer)

    return hook
