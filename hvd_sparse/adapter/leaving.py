"""A bounded end of the process: Horovod's own waits for all ranks, and so for one that hangs."""

from __future__ import annotations

import atexit
import faulthandler
import sys
import weakref
from functools import partial
from typing import Protocol

EXIT_S = 6.0
"""What Horovod's end may take after an exchange has failed."""


class Leaving(Protocol):
    """What may have to leave in a hurry."""

    def seconds_to_leave(self) -> float | None:
        """How long the end of this process may take from now on; None where that is no matter."""


class BoundedExit:
    """Ends this process with status 1 where Horovod does not end in time.

    Exit handlers run in the order opposite to that of their registration. `register` is therefore
    called after `hvd.init()`, which registers Horovod's, and after whatever else may take time.

    Args:
        leaving: Says at exit how long that may take; is not kept alive.
    """

    def __init__(self, leaving: Leaving) -> None:
        self._handler = partial(_limit, weakref.ref(leaving))
        weakref.finalize(leaving, atexit.unregister, self._handler).atexit = False

    def register(self) -> None:
        """Be called at exit before all that is registered by now."""
        atexit.unregister(self._handler)
        atexit.register(self._handler)


def _horovod_is_initialized() -> bool:
    operations = sys.modules.get("horovod.torch.mpi_ops")
    return operations is not None and bool(operations.is_initialized())


def _limit(leaving: weakref.ref[Leaving]) -> None:
    alive = leaving()
    seconds = None if alive is None else alive.seconds_to_leave()
    if seconds is None:
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # In C, as no Python thread can be started or run as late as this; shows where threads are.
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


if not _horovod_is_initialized():
    # Registered before Horovod's handler, and so called after it: what Python's own end takes after
    # that is not limited. Where this module is imported later than hvd.init(), that is, too.
    atexit.register(faulthandler.cancel_dump_traceback_later)
