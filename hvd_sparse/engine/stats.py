"""What an engine reports of its work."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from time import perf_counter

from hvd_sparse.errors import ConfigError
from hvd_sparse.tables import nbytes, table, tensors

HISTORY_STEPS = 1024
"""Steps that a bucket's history keeps."""
MOST_ROWS = 12
"""Buckets that the text of `Stats` shows: the largest ones."""
MOST_CHARACTERS = 32
"""What it shows of their names."""


@dataclass
class StepStats:
    """Figures of one bucket in one step, or the sums of several.

    Attributes:
        nnz_wanted: k, the entries wanted by the step's density. Under two levels the ranks of a
            host take them out together, each of its shard.
        nnz_selected: Entries taken out of this rank's accumulator.
        nnz_held_back: Further entries that were selected, and went back into the residual, since
            no more than four times k are sent.
        nnz_applied: Entries of the reduced gradient: all elements, where it came in dense form.
        bytes_sent: Bytes that this rank sent for the bucket, headers included.
        bytes_received: Bytes that it received, headers included.
        messages_sent: Messages that it sent.
        stage_s: Seconds spent copying gradients into a layout that the next pass can read, or on
            two levels summing them inside the host.
        accumulate_select_s: Seconds in the pass that accumulates and selects; the two are one.
        exchange_s: Seconds in the collective, waiting for peers included.
        decode_s: Seconds spent writing the dense gradient.
        wait_s: Seconds for which the training thread waited, all of it in a plan's last bucket.
        starts: When each of these phases last began, by its name, in seconds of `perf_counter`.
    """

    nnz_wanted: int = 0
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

    def minus(self, other: StepStats) -> StepStats:
        """These figures without another's."""
        return StepStats(**{name: getattr(self, name) - getattr(other, name) for name in FIGURES})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to the field of that name."""
        start = self.starts[name] = perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + perf_counter() - start)


FIGURES = tuple(item.name for item in fields(StepStats) if item.name != "starts")
"""The fields of `StepStats` that can be added up."""


@dataclass
class BucketStats(StepStats):
    """One bucket: the sums over all steps (the inherited fields), and the steps themselves.

    Attributes:
        names: The bucket's parameters.
        numel: n, elements in the bucket.
        k: Entries wanted per step, after the warm-up.
        compressor: Name of the method; empty where it has none.
        wire: Name of the form of the messages.
        collective: Name of the last step's algorithm; empty before the first step.
        steps: Steps done.
        threshold: Magnitude from which entries left in the last step; 0.0 where there is none.
        partition_nnz: k_i, entries selected in each partition in the last step; empty where the
            ranks do not select in partitions of their own, as in ExDyna.
        let_go_l1: L1 norms of the changes that `low_pass` and `residual_decay` made to the
            residual, over the steps: the mass that the bucket has lost. Set in snapshots.
        history: The last steps, oldest first.
    """

    names: tuple[str, ...] = ()
    numel: int = 0
    k: int = 0
    compressor: str = ""
    wire: str = ""
    collective: str = ""
    steps: int = 0
    threshold: float = 0.0
    partition_nnz: tuple[int, ...] = ()
    let_go_l1: float = 0.0
    history: deque[StepStats] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))

    @property
    def density(self) -> float:
        """Density of the sum: entries applied, of all ranks together, per element and step."""
        return self._per_element(self.nnz_applied)

    @property
    def density_selected(self) -> float:
        """Density of this rank: entries that it selected, per element and step."""
        return self._per_element(self.nnz_selected)

    @property
    def density_target(self) -> float:
        """k/n after the warm-up."""
        return self.k / self.numel if self.numel else 0.0

    @property
    def density_wanted(self) -> float:
        """Density of the steps taken, by the warm-up: entries wanted, per element and step."""
        return self._per_element(self.nnz_wanted)

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

    def snapshot(self, let_go_l1: float) -> BucketStats:
        """A copy that no later step changes."""
        history = self.history.copy()
        if history:
            history[-1] = replace(history[-1])  # `amend` may still change it
        return replace(self, starts=dict(self.starts), history=history, let_go_l1=let_go_l1)

    def since(self, earlier: BucketStats) -> BucketStats:
        """The steps after an earlier snapshot of the same bucket."""
        steps = self.steps - earlier.steps
        latest = islice(self.history, max(0, len(self.history) - steps), None)
        names = (*FIGURES, "steps", "let_go_l1")
        figures = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return replace(self, **figures, history=deque(latest, maxlen=HISTORY_STEPS))

    def _per_element(self, nnz: int) -> float:
        return nnz / (self.numel * self.steps) if self.numel and self.steps else 0.0


@dataclass(frozen=True)
class Stats:
    """A snapshot of an engine's figures, which later steps do not change.

    Its text (`str(stats)`) is a short table.

    Attributes:
        transport: Name of the transport, empty before the first step.
        buckets: One entry per bucket of the plan, in the order of exchange; their figures begin
            with the plan.
        steps: Steps under all plans so far, including those in which all tensors were dense.
        skipped_steps: Steps that were taken back, since their results were not applied.
        dropped_l1: L1 norm of residuals that this rank dropped: by a call, or since it was not at
            the commit from which `hvd.elastic` went on.
        waiting_l1: L1 norm of residuals outside the buckets: of frozen tensors, which keep them,
            and of tensors that have become dense, which release them.
        lost_l1: L1 norm of the residuals of workers that are gone, under `hvd.elastic`, as of the
            last commit. A worker that joined later knows of fewer.
        let_go_l1: L1 norms of the changes that `low_pass` and `residual_decay` made to residuals,
            over the steps.
        before: Sums over the buckets of earlier plans.
        plan: Number of the plan, from 1; 0 before the first.
        world_size: P; 0 before the first step.
        dense: Names of the tensors that are left dense, by the reason.
        embedding_bytes: Bytes sent by `exchange_embeddings` since it connected.
    """

    transport: str
    buckets: tuple[BucketStats, ...]
    skipped_steps: int = 0
    dropped_l1: float = 0.0
    waiting_l1: float = 0.0
    lost_l1: float = 0.0
    let_go_l1: float = 0.0
    steps: int = 0
    before: StepStats = field(default_factory=StepStats)
    plan: int = 0
    world_size: int = 0
    dense: Mapping[str, Sequence[str]] = field(default_factory=dict)
    embedding_bytes: int = 0

    @property
    def dense_bytes(self) -> float:
        """What a ring allreduce of the same tensors, in float32, would have sent from this rank."""
        elements = sum(bucket.numel * bucket.steps for bucket in self.buckets)
        return 8 * elements * (self.world_size - 1) / self.world_size if self.world_size else 0.0

    @property
    def totals(self) -> StepStats:
        """Sums over all buckets and steps, those of earlier plans too."""
        total = StepStats()
        for each in (self.before, *self.buckets):
            total.add(each)
        return total

    def since(self, earlier: Stats) -> Stats:
        """The figures since an earlier snapshot of the same compression.

        Sums become differences. Figures of the last step, such as thresholds, and `waiting_l1`
        stay. If the plan has changed in between, its buckets are whole, and `before` has what was
        done under earlier plans.

        Raises:
            ConfigError: The other snapshot is later.
        """
        if earlier.steps > self.steps or earlier.plan > self.plan:
            raise ConfigError(
                f"earlier must be a snapshot of up to {self.steps} steps, got one of "
                f"{earlier.steps} steps"
            )
        buckets, before = self.buckets, self.before.minus(earlier.totals)
        if earlier.plan == self.plan and earlier.buckets and self.buckets:
            pairs = zip(self.buckets, earlier.buckets, strict=True)
            buckets = tuple(now.since(then) for now, then in pairs)
            before = StepStats()
        names = ("steps", "skipped_steps", "dropped_l1", "lost_l1", "let_go_l1")
        since = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        sent = max(0, self.embedding_bytes - earlier.embedding_bytes)
        return replace(self, buckets=buckets, before=before, embedding_bytes=sent, **since)

    def __str__(self) -> str:
        if not self.steps:
            return "no step yet (one worker alone exchanges nothing)"
        total = self.totals
        own = sum(bucket.bytes_sent for bucket in self.buckets)
        less = f" ({self.dense_bytes / own:.3g} × less than dense)" if own else ""
        skipped = f", {self.skipped_steps} of them skipped" if self.skipped_steps else ""
        lines = [
            f"{self.steps} steps{f' by {self.transport}' if self.transport else ''}{skipped}: "
            f"{nbytes(total.bytes_sent)} sent{less}, {nbytes(total.bytes_received)} received, "
            f"{1e3 * total.wait_s / self.steps:.3g} ms a step waited for"
        ]
        if self.buckets:
            lines.append(self._table())
            lines.append(
                "densities: own, that this rank selected, of what was wanted; sum, of all ranks"
            )
        if len(self.buckets) > MOST_ROWS:
            lines.append(f"and {len(self.buckets) - MOST_ROWS} smaller buckets")
        if self.embedding_bytes:
            lines.append(f"embeddings: {nbytes(self.embedding_bytes)} sent")
        for why, names in self.dense.items():
            lines.append(f"dense, {why}: {tensors(names)}")
        gradient = {
            "waits outside the buckets": self.waiting_l1,
            "dropped": self.dropped_l1,
            "lost with workers that are gone": self.lost_l1,
            "let go by low_pass and residual_decay": self.let_go_l1,
        }
        told = [f"{l1:.3g} {what}" for what, l1 in gradient.items() if l1]
        if told:
            lines.append(f"gradient that was not sent (L1 norm): {', '.join(told)}")
        return "\n".join(lines)

    def _table(self) -> str:
        """The largest buckets; bytes and milliseconds are means per step."""
        largest = sorted(range(len(self.buckets)), key=lambda b: -self.buckets[b].numel)
        columns = "tensors n compressor collective wire own of sum threshold sent"
        rows = [["", *columns.split()]]
        for place in sorted(largest[:MOST_ROWS]):
            bucket = self.buckets[place]
            steps = max(1, bucket.steps)
            names = tensors(bucket.names)
            rows.append(
                [
                    str(place),
                    names if len(names) <= MOST_CHARACTERS else f"{names[: MOST_CHARACTERS - 1]}…",
                    f"{bucket.numel:,}",
                    bucket.compressor or "–",
                    bucket.collective or "–",
                    bucket.wire or "–",
                    f"{bucket.density_selected:.3g}",
                    f"{bucket.density_wanted:.3g}",
                    f"{bucket.density:.3g}",
                    f"{bucket.threshold:.3g}" if bucket.threshold else "–",
                    nbytes(bucket.bytes_sent / steps),
                ]
            )
        return table(rows)
