"""What became of a step's gradients: whether the optimizer applied them, and at which loss scale.

A loss scaler skips a step in which any gradient is not finite, and a script may skip one for its
own reasons. What the compression took out of its residuals for such a step was applied by nobody,
so it has to go back.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from hvd_sparse.adapter.refusals import refuse_to_reduce_again
from hvd_sparse.errors import ConfigError, UnsupportedError

SCALERS_FILE = torch.amp.GradScaler.step.__code__.co_filename
SEARCHED_FRAMES = 16
"""From an optimizer's hook up to the loss scaler that called its `step`."""


class StepFate:
    """Listens to an optimizer, and to the `GradScaler` that steps it, if there is one.

    Rules: a step counts where the optimizer's own `step` ran after the reduction, and did not skip
    it inside (fused optimizers do so when they find infinities). Otherwise it does not count. An
    optimizer that has never stepped may be one whose gradients a script applies by itself: until
    its first step, reductions count where all their results are finite.

    Args:
        optimizer: Horovod's.

    Attributes:
        unit: The loss scale that residuals are multiplied by; None while no scaler is known.
        taken_back: The call that took the last reduction back, since no step had applied it; or
            None.
    """

    def __init__(self, optimizer: Any) -> None:
        self._has_stepped = False
        self._stepped = False
        self._saw_non_finite = False
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self.unit: float | None = None
        self.taken_back: str | None = None
        self._reductions_inside: int | None = None  # a step with a closure, which has begun
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._on_step)

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

    def begin_step(self) -> None:
        """The last step is settled, and the next one begins."""
        self._stepped = self._saw_non_finite = False
        self.taken_back = None

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Of Horovod's step, and once more of the wrapped one's, after Horovod has synchronized.

        Raises:
            UnsupportedError: Horovod would reduce once more what it has reduced.
        """
        if optimizer._should_synchronize:
            advice = "call it under optimizer.skip_synchronize()"
            refuse_to_reduce_again(optimizer, "optimizer.step()", advice)
        closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        self._reductions_inside = None if closure is None else 0

    def reduced_densely(self, gradient: Tensor) -> None:
        """Horovod has reduced a gradient itself."""
        if not self._has_stepped and not bool(gradient.isfinite().all()):
            self._saw_non_finite = True

    def counts(self) -> bool | None:
        """Whether the last reduction counts; None: if all compressed results are finite."""
        if self._stepped:
            return True
        return False if self._has_stepped or self._saw_non_finite else None

    def rescaling(self) -> float:
        """What the loss scale has been multiplied by since this was last asked."""
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None or self.unit is None:
            return 1.0
        before, self.unit = self.unit, scaler.get_scale()
        return self.unit / before

    def _on_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """After the wrapped step, and once more after Horovod's.

        Raises:
            ConfigError: It has applied a reduction that was taken back.
        """
        self._look_for_scaler()
        self._has_stepped = True
        self._reductions_inside = None
        found_inf = getattr(optimizer, "found_inf", None)  # a scaler's word to a fused optimizer
        self._stepped = not (isinstance(found_inf, Tensor) and bool(found_inf))
        if self._stepped and self.taken_back is not None:
            raise ConfigError(
                f"{self.taken_back} must be called between steps, got a call after "
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
