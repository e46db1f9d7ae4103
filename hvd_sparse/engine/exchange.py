"""One step of one bucket: the data flow, in order."""

from __future__ import annotations

from hvd_sparse.collectives.registry import name_of
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.staging import Stage
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.selectors.correction import hold_back
from hvd_sparse.transports import Context


def exchange(bucket: Bucket) -> None:
    """One step of one bucket: accumulate, select, reduce, give back.

    Leaves the sum over the ranks in `bucket.reduced`. Until the step is settled, or where the
    exchange fails, `bucket.roll_back` takes all of it back.
    """
    select(bucket)
    reduce(bucket)


def select(bucket: Bucket) -> None:
    """The first half of a bucket's step: accumulate and select, without a message.

    Under two levels, what is accumulated is the host's sum of this rank's shard. Where that takes
    messages, nothing may be selected ahead (`InsideHost.needs_order`).

    Leaves the entries to send in `bucket.taken`. What a selector takes beyond a few times k waits
    in the residual for the next steps.

    It may run while another bucket is exchanged. What it reads and writes is the bucket's own: its
    memory, its selector, and of its collective what the bucket's last step has left (ExDyna's
    partition, CLT-k's leader, an agreed threshold). The transport is not touched.
    """
    memory, stats = bucket.memory, bucket.step_stats
    with stats.timed("stage_s"):
        gradients = bucket.gradients()
    with stats.timed("accumulate_select_s"):
        stats.nnz_wanted = bucket.k
        stage = bucket.stages.at(bucket.shard_k, bucket.step)
        bucket.stats.collective = name_of(stage.collective)
        scope = stage.collective.scope()
        bucket.open_step()
        accumulator = memory.accumulate(gradients, stage.k, scope)
        selected = stage.select(bucket.selector, accumulator)
        bucket.taken = hold_back(accumulator, selected, stage.k)
        if not stays(stage, bucket):
            bucket.lane.send(bucket.taken)
    bucket.stage = stage
    stats.nnz_held_back = selected.nnz - bucket.taken.nnz


def reduce(bucket: Bucket) -> None:
    """The second half: reduce what was selected, and give back what had no part.

    Under two levels, the shards' sums are then gathered from the ranks of the host.

    All ranks reduce their buckets one after the other, in one order.
    """
    taken, bucket.taken = bucket.taken, None
    stage, bucket.stage = bucket.stage, None
    assert taken is not None
    assert stage is not None
    memory, transport, stats = bucket.memory, stage.collective.transport, bucket.step_stats
    transport.context = Context(bucket.specs[0].label, bucket.step)
    traffic = transport.traffic.snapshot()
    with stats.timed("exchange_s"):
        sent = taken if stays(stage, bucket) else bucket.lane.landed(taken)
        reduction = stage.collective.reduce(sent, memory.take_at)
        memory.give_back(taken, reduction.returned.finite())
        applied = memory.applied(reduction.reduced)
        bucket.reduced = applied if bucket.inside is None else bucket.inside.gather(applied)
    bucket.step += 1
    of_all = reduction.reduced if bucket.inside is None else bucket.reduced
    bucket.poisoned = not of_all.isfinite()

    spent = transport.traffic.since(traffic)
    stats.nnz_selected, stats.nnz_applied = taken.nnz, of_all.nnz
    stats.messages_sent = spent.messages_sent
    stats.bytes_sent, stats.bytes_received = spent.bytes_sent, spent.bytes_received


def stays(stage: Stage, bucket: Bucket) -> bool:
    """Whether entries are exchanged from the device on which they are."""
    device = stage.collective.device
    return device is not None and device.type == bucket.decoded.device.type


def decode(bucket: Bucket, scale: float, stats: StepStats) -> None:
    """Write the reduced entries, times `scale`, and zeros elsewhere."""
    assert bucket.reduced is not None
    with stats.timed("decode_s"):
        bucket.reduced.write(bucket.decoded, scale)
    bucket.reduced = None


def work_ahead(bucket: Bucket) -> None:
    """What the worker may do in one step of one bucket while it exchanges another one."""
    with bucket.lane.work():
        if bucket.clipping is not None:
            bucket.clipping.apply(bucket)
        select(bucket)


def work(bucket: Bucket, scale: float | None) -> None:
    """What it does then, in its turn; decodes, where that can be done already."""
    with bucket.lane.work():
        reduce(bucket)
        if scale is not None and not bucket.decoding_would_overwrite_gradients():
            decode(bucket, scale, bucket.step_stats)
