"""What an engine reports of its work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter

HISTORY_STEPS = 1024
"""Steps that a bucket's history keeps."""


@dataclass
class StepStats:
    """One bucket in one step, or the sum of several.

    Attributes:
        nnz_selected: Entries taken out of this rank's accumulator.
        nnz_held_back: Entries that were selected beside them, and went back into the residual:
            more than four times k would have been sent.
        nnz_applied: Entries of the reduced gradient: all elements, where it came in dense form.
        bytes_sent: Bytes that this rank sent for the bucket, headers included.
        bytes_received: Bytes that it received, headers included.
        messages_sent: Messages that it sent.
        stage_s: Seconds spent copying gradients into a layout that the next pass can read.
        accumulate_select_s: Seconds in the pass that accumulates and selects; the two are one.
        exchange_s: Seconds in the collective, waiting for peers included.
        decode_s: Seconds spent writing the dense gradient.
        wait_s: Seconds for which the training thread waited for the bucket's result.
        starts: When each of these phases last began, by its name, as `perf_counter` counts.
    """

    nnz_selected: int = 0
    nnz_held_back: int = 0
    nnz_applied: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    stage_s: float = 0.0
    accumulate_select_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)

    def add(self, other: StepStats) -> None:
        """Add another step's figures to these."""
        for name in FIGURES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes to the field of that name."""
        start = self.starts[name] = perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + perf_counter() - start)


FIGURES = tuple(item.name for item in fields(StepStats) if item.name != "starts")
"""What is counted: the fields of `StepStats` that can be added up."""


@dataclass
class BucketStats(StepStats):
    """One bucket: the sums over all steps (the inherited fields), and the steps themselves.

    Attributes:
        names: The bucket's parameters.
        numel: n, elements in the bucket.
        k: Entries wanted per step.
        collective: Name of the algorithm that the last step was exchanged by; empty before it.
        steps: Steps done.
        threshold: Magnitude from which entries left in the last step; 0.0 where there is none.
        partition_nnz: k_i, entries selected in each partition in the last step; empty where the
            ranks do not select in partitions of their own, as in ExDyna.
        history: The last steps, oldest first.
    """

    names: tuple[str, ...] = ()
    numel: int = 0
    k: int = 0
    collective: str = ""
    steps: int = 0
    threshold: float = 0.0
    partition_nnz: tuple[int, ...] = ()
    history: deque[StepStats] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))

    @property
    def density(self) -> float:
        """Density reached: entries applied, per element and step."""
        return self.nnz_applied / (self.numel * self.steps) if self.numel and self.steps else 0.0

    @property
    def imbalance(self) -> float:
        """f(t) of ExDyna (equation 5): P times the largest k_i over their sum; 0.0 without any."""
        total = sum(self.partition_nnz)
        return len(self.partition_nnz) * max(self.partition_nnz) / total if total else 0.0

    def record(self, step: StepStats) -> None:
        """Count one more step."""
        self.steps += 1
        self.starts, step.starts = step.starts, {}  # of the last step only
        self.history.append(step)
        self.add(step)

    def amend(self, late: StepStats) -> None:
        """Add figures that became known after their step, the last one, was recorded."""
        self.starts.update(late.starts)
        self.history[-1].add(late)
        self.add(late)


@dataclass(frozen=True)
class Stats:
    """What `Engine.stats()` returns.

    Attributes:
        transport: Name of the transport, empty before the first step.
        buckets: One entry per bucket, in the order in which they are exchanged.
        skipped_steps: Steps that were taken back, since nobody applied their results.
        dropped_l1: L1 norm of residuals that this rank let go of, since a caller said so, or since
            it was not at the commit that `hvd.elastic` went on from.
        waiting_l1: L1 norm of residuals that are in no exchange: of frozen tensors, which hold
            them, and of tensors that have become dense, which release them.
        lost_l1: L1 norm of the residuals of workers that are gone, under `hvd.elastic`, as of the
            last commit. What this worker knows of: one that joined later knows less.
        let_go_l1: L1 norms of what `low_pass` and `residual_decay` took out of residuals or put in,
            over the steps.
    """

    transport: str
    buckets: list[BucketStats]
    skipped_steps: int = 0
    dropped_l1: float = 0.0
    waiting_l1: float = 0.0
    lost_l1: float = 0.0
    let_go_l1: float = 0.0

    @property
    def totals(self) -> StepStats:
        """Sums over all buckets and steps."""
        total = StepStats()
        for bucket in self.buckets:
            total.add(bucket)
        return total
