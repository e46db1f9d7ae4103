"""The end of this process: what is open ends, peers are told why, and Horovod's end is bounded.

One exit handler does all of it. It comes before Horovod's, whichever was registered first: Horovod
begins its end with it. Exit handlers of the user's run undisturbed, before and after.

A forked child has copies of what is open, but the threads and the connections are its parent's. It
lets go of them, and its end tells nobody anything.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hvd_sparse.errors import one_line, warn

EXIT_S = 6.0
"""What Horovod's end may take after a failure; it waits for all ranks, also for one that hangs."""


class Leaving:
    """What is to end with the process."""

    def leave(self, error: BaseException | None) -> bool:
        """End; where an error ends the process, peers that wait, now or later, report that error.

        Returns:
            Whether it has failed, or was in the middle of something.
        """
        raise NotImplementedError

    def disown(self) -> None:
        """Let go of threads, locks and connections, in a forked child, if there are any."""


class ProcessEnd:
    """Ends what was added, last in first out, and then Horovod, within `EXIT_S` after a failure.

    Attributes:
        life: Horovod's: another object after each `hvd.shutdown()`, not after each `hvd.init()`,
            of which all but the first do nothing.
    """

    def __init__(self) -> None:
        self._open: WeakKeyDictionary[Leaving, None] = WeakKeyDictionary()
        self._has_failed = False
        self.life: object = object()
        os.register_at_fork(after_in_child=self._disown)

    def add(self, leaving: Leaving) -> None:
        """End this with the process, unless it is gone or has ended; it is not kept alive."""
        self._open.pop(leaving, None)
        self._open[leaving] = None
        # Before a user's handlers that were registered by now: they may take long, and peers wait.
        atexit.unregister(self.leave)
        atexit.register(self.leave)
        operations = sys.modules.get("horovod.torch.mpi_ops")
        library: Any = None if operations is None else operations._basics.MPI_LIB_CTYPES
        if library is not None and not isinstance(library.horovod_shutdown, partial):
            library.horovod_shutdown = partial(self._end_horovod, library.horovod_shutdown)

    def leave(self) -> None:
        """End everything; never raises."""
        error = getattr(sys, "last_value", None)  # set by Python for what nobody has caught
        for reference in reversed(self._open.keyrefs()):
            leaving = reference()
            if leaving is None:
                continue
            self._open.pop(leaving, None)
            self._has_failed |= error is not None
            try:
                self._has_failed |= leaving.leave(error)
            except Exception as failure:  # the others are to end all the same
                warn(f"{leaving} could not be ended: {one_line(failure)}")

    def _end_horovod(self, end: Callable[[], object]) -> object:
        """Horovod's end; one within the process's life is the user's alone."""
        if threading.main_thread().is_alive():
            self.life = object()
            return end()
        self.leave()
        if not self._has_failed:
            return end()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                if stream is not None:
                    stream.flush()
        # In C, as no Python thread can be started as late as this; shows where threads are.
        faulthandler.dump_traceback_later(EXIT_S, exit=True, file=2)
        ended = end()
        faulthandler.cancel_dump_traceback_later()
        return ended

    def _disown(self) -> None:
        if not self._open and "horovod.torch.mpi_ops" not in sys.modules:
            return
        for reference in self._open.keyrefs():
            leaving = reference()
            if leaving is not None:
                leaving.disown()
        self._open.clear()
        # Or destructors of native code, Horovod's too, would take the parent's sockets out of the
        # set on which its threads wait, which both share, and then wait for these threads.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # glibc: calls `_exit` with the status
            libc.on_exit(libc._exit, None)


PROCESS_END = ProcessEnd()


def keep_forever(kept: object) -> None:
    """Never destroy an object: a child's copy of a connection would end that of its parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
