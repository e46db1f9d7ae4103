"""A Horovod optimizer that sleeps while it waits for other ranks, and sees when that is in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from hvd_sparse.adapter.refusals import refuse_to_reduce_again
from hvd_sparse.transports.horovod_handles import SPIN_S, Pauses, wait_for

T = TypeVar("T")

CAUSE_S = 1.0
"""How long after Horovod, which names no rank, an exchange may still say what it has failed by."""

CAUSE_INTERVAL_S = 0.01

SLEPT_SHARE = 0.1
LONGEST_SLEEP_S = 2e-3
"""As Pauses has them, but longer: every look wakes this thread on a core that Horovod's may need. A
dense step of a small transformer, 2 ranks on 2 cores, takes 0.94 of plain Horovod's time with these
(3 launches: 0.93 to 0.94), and took 1.06 to 1.13 with sleeps of a fifth."""

LOOK_S = 0.05
"""From one look at Horovod to the next, while exchanges are waited for."""


def synchronize_asleep(
    optimizer: Any, raise_failure: Callable[[], None], exchanged: Callable[[float], bool]
) -> None:
    """Let a Horovod optimizer's `synchronize`, which `step` calls, sleep while it waits.

    The exchanges come first: a thread wakes this one when they are done. Horovod tells nobody, and
    has to be looked at, which takes the processor and Python's lock from the exchanges. It is done
    by then, as a rule.

    Args:
        optimizer: Horovod's.
        raise_failure: Raises what the exchange of this step has failed by, if it has. Horovod would
            wait on: for its own timeout, or for good.
        exchanged: Waits for so many seconds at most; returns whether the exchanges of this step are
            done, have failed, or cannot begin.

    The new `synchronize` refuses to reduce again what is reduced; see `refuse_to_reduce_again`.
    """
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    synchronize = optimizer.synchronize

    def synchronize_after_sleep() -> None:
        if optimizer.process_set.included():
            advice = "call it once for each step"
            refuse_to_reduce_again(optimizer, "optimizer.synchronize()", advice)
            hand_over_rest(optimizer)
            handles = [handle for handle, _ in optimizer._handles.values()]
            handles = [handle for handle in handles if not callable(handle)]  # that is two gathers
            while not exchanged(LOOK_S) and not all(map(hvd.poll, handles)):
                pass  # where Horovod is done first, it may know why: a rank that has joined, say
            wait_for(handles, raise_failure, Pauses(SPIN_S, SLEPT_SHARE, LONGEST_SLEEP_S))
            raise_failure()  # Horovod may have ended because of it: this is the first cause
        try:
            synchronize()
        except HorovodInternalError:
            await_cause(raise_failure)
            raise

    optimizer.synchronize = synchronize_after_sleep


def await_cause(raise_failure: Callable[[], None]) -> None:
    """Raise what the exchange has failed by, if it says so soon; Horovod was only the first to."""
    until = time.monotonic() + CAUSE_S
    while time.monotonic() < until:
        raise_failure()
        time.sleep(CAUSE_INTERVAL_S)


def hand_over_rest(optimizer: Any) -> None:
    """Give Horovod the gradients that a backward pass left out: other ranks may wait for them.

    Its `synchronize` would begin with the same, and now finds nothing left to do.
    """
    handed_over: set[Any] = set()
    for key, (handle, _) in optimizer._handles.items():
        if handle is not None:
            handed_over.update(key if isinstance(key, tuple) else (key,))
    for parameter in optimizer._requires_update - handed_over:
        optimizer._handles[parameter] = optimizer._allreduce_grad_async(parameter)


def interruptibly(call: Callable[[], T], abort: Callable[[BaseException], None]) -> T:
    """Make a call that waits in native code, where Python would not see Ctrl-C until it returns.

    Args:
        call: What to do, in a thread of its own.
        abort: Ends the call early, with the error by which this thread was interrupted.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="hvd_sparse.call", daemon=True)
    thread.start()
    try:
        return outcome.result()
    except BaseException as error:
        if not outcome.done():
            abort(error)
        raise
    finally:
        thread.join()
