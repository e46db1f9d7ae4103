"""Waits that sleep, stop when a peer is gone, and can be interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from hvd_sparse.errors import TransportError
from hvd_sparse.transports import horovod_handles
from hvd_sparse.transports.horovod_handles import SPIN_S, Pauses
from hvd_sparse.transports.transport import start_thread

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


def wait_for(handles: Iterable[int], raise_failure: Callable[[], None]) -> None:
    """Return once Horovod's `synchronize` would return at once for every one of the handles."""
    horovod_handles.wait_for(handles, raise_failure, Pauses(SPIN_S, SLEPT_SHARE, LONGEST_SLEEP_S))
    raise_failure()  # Horovod may have ended because of it: this is the first cause


def await_cause(raise_failure: Callable[[], None]) -> None:
    """Raise what the exchange has failed by, if it says so soon; Horovod was only the first to."""
    until = time.monotonic() + CAUSE_S
    while time.monotonic() < until:
        raise_failure()
        time.sleep(CAUSE_INTERVAL_S)


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

    try:
        thread = start_thread("hvd_sparse.call", run)
    except TransportError as error:
        abort(error)
        raise
    try:
        return outcome.result()
    except BaseException as error:
        if not outcome.done():
            abort(error)
        raise
    finally:
        thread.join()
