"""The background threads of an engine, and what they share with the training thread.

One thread exchanges the buckets, in the plan's order. If there are several, a second one selects
ahead, from buckets whose gradients are there, while the first one waits for peers. The first one
selects from the next bucket itself if the second one has not begun to.

The threads hold no reference to the engine, so that it can be collected. It then closes its worker.
They end before the interpreter shuts down (`leaving`): Python would unwind the stack of a thread
that returns from native code, and a C++ frame that must not throw then ends the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import cycle, pairwise

import torch
from typing_extensions import override

from hvd_sparse.engine.bucket import Bucket, Phase
from hvd_sparse.engine.clipping import StepClipping
from hvd_sparse.engine.exchange import decode, reduce, select
from hvd_sparse.errors import TransportError
from hvd_sparse.leaving import PROCESS_END, Leaving
from hvd_sparse.transports import Transport
from hvd_sparse.transports.supervised import Awaiting, SupervisedTransport
from hvd_sparse.transports.transport import start_thread

GRACE_S = 0.1
"""How long an exchange under way may still take when the thread is to end, since its peers may do
the same."""

ABANDON_S = 5.0
"""A wait of a transport that has failed ends within this time, or is abandoned."""

_ABANDONED: list[Transport | None] = []
"""Transports in which a thread waits for good; nobody touches them again."""


class Worker(Leaving):
    """Works on the buckets of a plan, in the plan's order, each as soon as its gradients are there.

    Attributes:
        scale: Factor of the sums over the ranks; None while it is not known.
        unit: The loss scale that gradients are multiplied by, for clipping; 1 where there is none.
        error: Why the step under way has failed, or None.
    """

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.scale: float | None = None
        self.unit = 1.0
        self.error: BaseException | None = None
        self._buckets: Sequence[Bucket] = ()
        self._at: Bucket | None = None  # what the first thread is at, or waits for
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._spent: list[object] = []
        self._clipping: StepClipping | None = None
        self._stopping = False
        self._exchanging = False  # whether the first thread runs
        self._orphaned = False  # whether it is to close the transport when it ends
        self._num_threads = torch.get_num_threads()

    @property
    def at_rest(self) -> bool:
        return self.error is None and not any(b.phase.is_due for b in self._buckets)

    def connect(self, transport: Transport) -> None:
        """Use a transport until `close` closes it, at exit at the latest."""
        self.transport = transport
        PROCESS_END.add(self)

    def start(self, buckets: Sequence[Bucket]) -> None:
        """Begin to work on the buckets of a plan, in their order.

        Where any of them is clipped, a step begins only once the gradients of all of them are
        there. Where selecting takes messages, nothing is selected ahead.
        """
        assert self.transport is not None
        self._buckets, self._at = buckets, buckets[0]
        clips = any(bucket.method.clip_norm is not None for bucket in buckets)
        self._clipping = StepClipping(buckets, self.transport.world_size) if clips else None
        in_order = any(b.inside is not None and b.inside.needs_order for b in buckets)
        tasks = {"hvd_sparse": self._exchange_and_end}
        if len(buckets) > 1 and not in_order:
            tasks["hvd_sparse.ahead"] = self._select_ahead
        self._exchanging = True
        try:
            with self._changed:  # a thread that fails at once must find itself among them
                for name, task in tasks.items():
                    self._threads.append(start_thread(name, self._until_it_fails, task))
        except TransportError as error:
            self._exchanging = bool(self._threads)
            self.fail(error)
            raise

    def stop(self, reason: object = "it gave up an exchange under way") -> None:
        """End the threads, and forget their plan, scale and error.

        An exchange under way is aborted if the peers do not finish it at once. They then report
        the `reason`. A thread that waits on in the transport for `ABANDON_S` is abandoned with it.
        """
        with self._changed:
            self._stopping = True
            inside = (b for b in self._buckets if b.inside is not None)  # they wait for their host
            exchanging = self._is_exchanging or any(b.phase is Phase.SELECTING for b in inside)
            self._changed.notify_all()
        if threading.current_thread() in self._threads:
            return  # the engine was collected in a thread, which ends after what it is at
        for thread in self._threads:
            thread.join(GRACE_S if exchanging else None)
            if thread.is_alive() and self.transport is not None:
                self.transport.abort(reason)
            while thread.is_alive():
                waits = self._waits_in_vain()
                thread.join(ABANDON_S)
                if thread.is_alive() and waits is not None and waits == self._waits_in_vain():
                    _ABANDONED.append(self.transport)
                    break
        self._exchanging = False
        self.scale = self.error = self._at = None
        self._threads, self._buckets, self._clipping = [], (), None
        self._stopping = False

    def close(self) -> None:
        self.stop()
        with self._changed:
            self._orphaned = self._exchanging and threading.current_thread() in self._threads[1:]
        if not self._orphaned:  # else the first thread does it, once it needs the transport no more
            self._close_transport()

    def _close_transport(self) -> None:
        transport, self.transport = self.transport, None
        if transport is not None and not any(transport is other for other in _ABANDONED):
            transport.close()

    @override
    def leave(self, error: BaseException | None) -> bool:
        """`Leaving.leave`; finishes an exchange that the peers finish at once."""
        at_rest = self.at_rest
        self.stop("its process ends" if error is None else error)
        if error is not None and self.transport is not None:
            self.transport.abort(error)
        self.close()
        return not at_rest

    @override
    def disown(self) -> None:
        Worker.__init__(self)

    # -- for the training thread -------------------------------------------------------------------

    def begin(self, bucket: Bucket) -> None:
        with self._changed:
            if bucket.phase is Phase.COLLECTING:
                bucket.phase = Phase.READY
                self._num_threads = torch.get_num_threads()
                self._changed.notify_all()

    def wait_for(self, bucket: Bucket, phase: Phase) -> None:
        """Wait until a bucket's step is in a phase; raises what the step has failed by."""
        with self._changed:
            while not self._changed.wait_for(
                lambda: bucket.phase is phase or self.error is not None, ABANDON_S
            ):
                if self.transport is not None and self._waits_in_vain() is not None:
                    self.error = self.transport.failure
            if bucket.phase is not phase:
                assert self.error is not None
                raise self.error

    def _waits_in_vain(self) -> Awaiting | None:
        """What a thread waits for in a transport that has failed, and so ought to be told."""
        transport = self.transport
        if not isinstance(transport, SupervisedTransport) or transport.failure is None:
            return None
        return transport.awaits()

    def at_pause(self) -> AbstractContextManager[object]:
        """A block in which no bucket's exchange ends, so that statistics do not change."""
        return self._changed

    def wait_for_all(self, timeout_s: float) -> bool:
        """Wait while exchanges are under way, but no longer than `timeout_s`.

        Does not wait for those behind a missing gradient: the caller may be the one to bring it.
        Returns whether no exchange is under way any more; they may have failed.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self.error is not None or not self._is_exchanging, timeout_s
            )

    @property
    def _is_exchanging(self) -> bool:
        """Whether the exchange that is next in the plan's order is due, or under way."""
        return self._may_begin and self._at is not None and self._at.phase.is_due

    def fail(self, error: BaseException) -> None:
        """Keep the first error, wake all who wait, and abort the transport."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        if self.transport is not None:
            self.transport.abort(error)

    def let_go(self, spent: object) -> None:
        with self._changed:
            if self._exchanging:
                self._spent.append(spent)
                self._changed.notify_all()

    # -- the background threads --------------------------------------------------------------------

    def _until_it_fails(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            with self._changed:
                is_ours = threading.current_thread() in self._threads  # else: abandoned
            if is_ours:
                self.fail(error)

    def _exchange_and_end(self) -> None:
        try:
            self._exchange_all()
        finally:
            with self._changed:
                is_ours = threading.current_thread() in self._threads
                self._exchanging = self._exchanging and not is_ours
            if self._orphaned and is_ours:
                self._close_transport()

    def _exchange_all(self) -> None:
        for bucket, following in pairwise(cycle(self._buckets)):
            if not self._wait_while(bucket, Phase.COLLECTING, Phase.EXCHANGED):
                return
            self._take_over(bucket)
            if self._claim(bucket):
                self._select_now(bucket)
            elif not self._wait_while(bucket, Phase.SELECTING):
                return
            with bucket.lane.work():
                reduce(bucket)
                if self.scale is not None and not bucket.decoding_would_overwrite_gradients():
                    decode(bucket, self.scale, bucket.step_stats)
            with self._changed:
                bucket.end_exchange()
                self._at = following
                self._changed.notify_all()

    def _select_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._next_ahead() is not None)
                bucket = None if self._is_over else self._next_ahead()
                if bucket is None:
                    return
                bucket.phase = Phase.SELECTING
            self._take_over(bucket)
            self._select_now(bucket)

    @property
    def _may_begin(self) -> bool:
        """Whether all gradients are there for which a step's first bucket waits."""
        return not (
            self._clipping is not None and any(b.phase is Phase.COLLECTING for b in self._buckets)
        )

    @property
    def _is_over(self) -> bool:
        return self._stopping or self.error is not None

    def _next_ahead(self) -> Bucket | None:
        """A bucket to select from; None while the first thread selects, or is about to."""
        assert self._at is not None
        if self._at.phase in (Phase.READY, Phase.SELECTING) or not self._may_begin:
            return None
        ready = (b for b in self._buckets if b.phase is Phase.READY and b is not self._at)
        return next(ready, None)

    def _claim(self, bucket: Bucket) -> bool:
        with self._changed:
            is_mine = bucket.phase is Phase.READY
            if is_mine:
                bucket.phase = Phase.SELECTING
            return is_mine

    def _take_over(self, bucket: Bucket) -> None:
        """Set what a new thread does not inherit: the number of threads, and the current device."""
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        if bucket.decoded.is_cuda:  # else device 0 gets a context from every rank
            torch.cuda.set_device(bucket.decoded.device)

    def _select_now(self, bucket: Bucket) -> None:
        with bucket.lane.work():
            if self._clipping is not None:
                assert self.scale is not None  # the first results bring it, and then the plan
                self._clipping.apply(bucket, self.scale / self.unit)
            select(bucket)
        with self._changed:
            bucket.phase = Phase.SELECTED
            self._changed.notify_all()

    def _wait_while(self, bucket: Bucket, *phases: Phase) -> bool:
        """Wait until a bucket is in none of the phases; false if the worker is to end."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._spent or self._has_left(bucket, phases) or self._is_over
                )
                spent, self._spent = self._spent, []
                if self._has_left(bucket, phases) or self._is_over:
                    return not self._is_over
            del spent  # without the lock: memory goes back to the system

    def _has_left(self, bucket: Bucket, phases: Sequence[Phase]) -> bool:
        return bucket.phase not in phases and self._may_begin
