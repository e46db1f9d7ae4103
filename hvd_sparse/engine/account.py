"""An engine's books over all of its plans, and the observer that it reports to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.stats import Stats, StepStats
from hvd_sparse.errors import logger, one_line, warn
from hvd_sparse.leaving import Leaving
from hvd_sparse.transports import Transport
from hvd_sparse.transports.transport import gather_json

COMPARED_PHASES = ("stage_s", "accumulate_select_s", "exchange_s", "decode_s", "wait_s")
"""The columns of what `Observer.compared` is given."""


class Observer(Protocol):
    """Is told what an engine does, on the training thread, between a step and the next one."""

    def planned(self, transport: Transport, buckets: Sequence[Bucket]) -> None:
        """The step that ends now made a plan; without buckets, the last plan was given up."""

    def stepped(self, buckets: Sequence[Bucket]) -> None:
        """A step has ended; the buckets' statistics include it. Without buckets, all was dense."""

    def compared(self, seconds: Tensor) -> None:
        """Seconds of the phases on every rank since the last call.

        They are float64 `(P, len(COMPARED_PHASES))`, and the same on every rank.
        """

    def tried(self, transport: Transport, trial: Mapping[str, Any]) -> None:
        """A planner has decided, between two steps; see `TrialOutcome.recorded`."""

    def ended(self) -> None:
        """No step follows by this transport."""


COMPARISON_INTERVAL = 64
"""Steps from one comparison of the ranks' times to the next, where an observer asks for it."""


class Account:
    """The books of one engine.

    An observer that raises is not called again: a warning says so, and training goes on.
    `step_began` says whether a step has begun that is not counted yet.
    """

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._rank = self._told_steps = 0
        self._buckets: Sequence[Bucket] = ()
        self._plans = 0
        self._before = StepStats()
        self._let_go_before_l1 = 0.0
        self.step_began = self._told_of_transport = self._comparing = False
        self._compared = torch.zeros(len(COMPARED_PHASES), dtype=torch.float64, device="cpu")

    def begin_plan(self, transport: Transport, buckets: Sequence[Bucket]) -> None:
        """Begin a plan; the ranks compare their times where rank 0 has an observer."""
        self._buckets = buckets
        self._plans += 1
        self._comparing = gather_json(transport, self._observer is not None, "observe")[0]
        self._compared.zero_()
        self.tell_plan(transport)

    def end_plan(self) -> None:
        self._let_go_before_l1 = self._let_go_l1
        for bucket in self._buckets:
            self._before.add(bucket.stats)
        self._buckets = ()

    def tell_plan(self, transport: Transport) -> None:
        self._told_of_transport, self._rank = True, transport.rank
        self.tell(lambda observer: observer.planned(transport, self._buckets))

    def disconnected(self) -> None:
        if self._told_of_transport:
            self.tell(lambda observer: observer.ended())
        self._told_of_transport = False

    def end_dense_step(self, transport: Transport | None, *, was_dense: bool) -> None:
        """Count the last step, if it has begun and nothing was exchanged in it."""
        began, self.step_began = self.step_began, False
        if not began or not was_dense or transport is None:
            return
        if not self._told_of_transport:
            self.tell_plan(transport)
        self._tell_step(())

    def end_step(self, transport: Transport) -> None:
        """Count a step whose sums are all there; the background threads are idle meanwhile."""
        self.step_began = False
        if self._comparing and self._buckets[0].stats.steps % COMPARISON_INTERVAL == 0:
            self._compare_ranks(transport)
        self._tell_step(self._buckets)

    def _compare_ranks(self, transport: Transport) -> None:
        stats = [bucket.stats for bucket in self._buckets]
        sums = [sum(getattr(each, name) for each in stats) for name in COMPARED_PHASES]
        now = torch.tensor(sums, dtype=torch.float64, device="cpu")
        since, self._compared = now - self._compared, now
        messages = transport.allgather((since,), channel="compare")
        everyone = torch.stack([message.view(torch.float64) for message in messages])
        self.tell(lambda observer: observer.compared(everyone))

    def _tell_step(self, buckets: Sequence[Bucket]) -> None:
        self.tell(lambda observer: observer.stepped(buckets))
        self._told_steps += 1

    def tell(self, call: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            call(self._observer)
        except Exception as error:
            logger.debug("an observer failed", exc_info=True)
            warn(
                f"rank {self._rank}: {self._observer} is off from step {self._told_steps + 1} on, "
                f"training goes on: {one_line(error)}"
            )
            if isinstance(self._observer, Leaving):
                self._observer.disown()  # the process ends without it
            self._observer = None

    @property
    def _let_go_l1(self) -> float:
        return self._let_go_before_l1 + sum(bucket.memory.let_go_l1 for bucket in self._buckets)

    def stats(self, transport: Transport | None, **figures: Any) -> Stats:
        """A snapshot, during which no exchange may end; `figures` are what is not counted here."""
        return Stats(
            transport.name if transport is not None else "",
            tuple(b.stats.snapshot(b.memory.let_go_l1) for b in self._buckets),
            let_go_l1=self._let_go_l1,
            steps=self._told_steps,
            before=replace(self._before),
            plan=self._plans,
            world_size=0 if transport is None else transport.world_size,
            **figures,
        )
