"""The background thread of an engine, and what it shares with the training thread.

The thread knows nothing of the engine, so that an engine which nobody refers to is collected, and
closes its worker.

Python ends a thread that comes back from native code while the interpreter shuts down, by unwinding
its stack; a C++ frame that must not throw then ends the process (`terminate called without an
active exception`). The thread therefore ends before Python does: `close` runs at exit.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvd_sparse.engine.bucket import Bucket, Phase
from hvd_sparse.transports import Transport

GRACE_S = 0.1
"""What is left to an exchange under way when the thread is to end: its peers may be there, too."""


class Worker:
    """Works on the buckets of a plan, in the plan's order, each as soon as its gradients are there.

    Args:
        work: One step of one bucket, without the reports; is given the bucket and the scale. Runs
            on the background thread.

    Attributes:
        transport: Connects the ranks; None before `connect` and after `close`.
        scale: What sums over ranks are multiplied by; None while that is not known.
        error: What the step under way failed by, or None.
    """

    def __init__(self, work: Callable[[Bucket, float | None], None]) -> None:
        self.transport: Transport | None = None
        self.scale: float | None = None
        self.error: BaseException | None = None
        self._work = work
        self._buckets: Sequence[Bucket] = ()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = self._together = False
        self._num_threads = torch.get_num_threads()

    @property
    def at_rest(self) -> bool:
        """Whether nothing has failed, and no bucket is due or under way."""
        return self.error is None and all(b.phase is not Phase.READY for b in self._buckets)

    def connect(self, transport: Transport) -> None:
        """Use a transport, which `close` closes; at exit at the latest."""
        self.transport = transport
        # Horovod's exit handler was registered earlier, by hvd.init(), and so runs later.
        atexit.register(self.close)

    def start(self, buckets: Sequence[Bucket], together: bool = False) -> None:
        """Begin to work on the buckets of a plan.

        Args:
            buckets: In their order.
            together: Whether a step begins only once the gradients of all of them are there.
        """
        self._buckets, self._together = buckets, together
        self._thread = threading.Thread(target=self._run, name="hvd_sparse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and forget its plan, scale and error.

        An exchange that is under way, and that its peers do not finish at once, is aborted.
        """
        with self._changed:
            self._stopping = True
            exchanging = any(bucket.phase is Phase.READY for bucket in self._buckets)
            self._changed.notify_all()
        thread = self._thread
        if thread is threading.current_thread():
            return  # the engine was collected in this thread, which ends after what it is at
        if thread is not None:
            thread.join(GRACE_S if exchanging else None)
            if thread.is_alive() and self.transport is not None:
                self.transport.abort()
            thread.join()
        self._thread = self.scale = self.error = None
        self._buckets = ()
        self._stopping = False

    def close(self) -> None:
        """Stop, and close the transport; may be called again."""
        self.stop()
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.close()
        atexit.unregister(self.close)

    # -- for the training thread -------------------------------------------------------------------

    def put(self, bucket: Bucket, place: int, gradient: Tensor) -> None:
        """Hand a gradient to its bucket; with the last one, the bucket is due."""
        with self._changed:
            bucket.put(place, gradient)
            if bucket.phase is Phase.READY:
                self._num_threads = torch.get_num_threads()
                self._changed.notify_all()

    def wait_for(self, bucket: Bucket, phase: Phase) -> None:
        """Wait until a bucket's step has come so far.

        Raises:
            BaseException: What the step has failed by.
        """
        with self._changed:
            self._changed.wait_for(lambda: bucket.phase is phase or self.error is not None)
            if bucket.phase is not phase:
                assert self.error is not None
                raise self.error

    def fail(self, error: BaseException) -> None:
        """Give up on the step under way: its waits, here and at the peers, end with an error."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        if self.transport is not None:
            self.transport.abort(error)

    # -- the background thread ---------------------------------------------------------------------

    def _run(self) -> None:
        buckets = self._buckets
        try:
            while True:
                for bucket in buckets:
                    if not self._wait_until_ready(bucket):
                        return
                    self._work(bucket, self.scale)
                    with self._changed:
                        bucket.end_exchange()
                        self._changed.notify_all()
        except BaseException as error:
            self.fail(error)

    def _wait_until_ready(self, bucket: Bucket) -> bool:
        """Wait for a bucket's gradients; false where there is no more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_due(bucket) or self._stopping or self.error)
            if self._stopping or self.error:
                return False
        if torch.get_num_threads() != self._num_threads:  # a new thread does not inherit it
            torch.set_num_threads(self._num_threads)
        return True

    def _is_due(self, bucket: Bucket) -> bool:
        if self._together and any(b.phase is Phase.COLLECTING for b in self._buckets):
            return False
        return bucket.phase is Phase.READY
