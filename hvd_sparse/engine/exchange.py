"""One step of one bucket: the data flow, in order.

`select`, `reduce` and `decode` are called by the worker's threads, by the planner, which times
them, and by the tests of the laws. None of them knows of threads.
"""

from __future__ import annotations

from hvd_sparse.collectives import Reduction
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.stats import StepStats
from hvd_sparse.selectors.correction import hold_back
from hvd_sparse.selectors.selector import own_k
from hvd_sparse.transports import Context


def select(bucket: Bucket) -> None:
    """The first half of a step: accumulate and select, without a message.

    Under two levels the host's sum of this rank's shard is accumulated. Where that sum takes
    messages, nothing may be selected ahead (`InsideHost.needs_order`).

    Leaves the entries to send in `bucket.taken`. What a selector takes beyond a few times k waits
    in the residual. It may run while another bucket is exchanged: it touches only the bucket's own
    memory and selector, and what the last step has left in the collective.
    """
    memory, stats = bucket.memory, bucket.step_stats
    with stats.timed("stage_s"):
        gradients = bucket.gradients()
    bucket.lane.begin()
    with stats.timed("accumulate_select_s"):
        stats.nnz_wanted = bucket.k_of(bucket.numel)
        stage = bucket.stages.at(bucket.k_of(memory.residual.numel()), bucket.step)
        bucket.stats.collective = stage.name
        bucket.lane.shrink(stage.k)
        scope = stage.collective.scope()
        bucket.open_step()
        accumulator = memory.accumulate(gradients, stage.k, scope)
        selected = stage.select(bucket.selector, accumulator)
        own = max(1, own_k(accumulator, stage.k))  # one may have to tell of what is not finite
        bucket.taken = hold_back(accumulator, selected, own)
        to_host = not stage.collective.reads_on(bucket.decoded.device)
        bucket.lane.send(bucket.taken, to_host=to_host)
    stats.nnz_held_back = selected.nnz - bucket.taken.nnz


def reduce(bucket: Bucket) -> Reduction:
    """The second half: reduce what was selected, and give back what had no part in the sum.

    Under two levels the shards' sums are then gathered from the ranks of the host. All ranks reduce
    their buckets one after the other, in one order. Leaves the sum in `bucket.reduced`; returns
    what the collective came to, before the memory made of it what the optimizer sees.
    """
    taken, bucket.taken = bucket.taken, None
    stage = bucket.stages.current
    assert taken is not None
    assert stage is not None
    memory, transport, stats = bucket.memory, stage.collective.transport, bucket.step_stats
    transport.context = Context(bucket.specs[0].label, bucket.step)
    traffic = transport.traffic.snapshot()
    with stats.timed("exchange_s"):
        sent = bucket.lane.landed(taken, stats)
        reduction = stage.collective.reduce(sent, memory.take_at)
        memory.give_back(taken, reduction.returned.finite())
        applied = memory.applied(reduction.reduced)
        bucket.reduced = applied if bucket.inside is None else bucket.inside.gather(applied)
    bucket.step += 1
    of_all = reduction.reduced if bucket.inside is None else bucket.reduced

    spent = transport.traffic.since(traffic)
    stats.nnz_selected, stats.nnz_applied = taken.nnz, of_all.nnz
    stats.messages_sent = spent.messages_sent
    stats.bytes_sent, stats.bytes_received = spent.bytes_sent, spent.bytes_received
    return reduction


def decode(bucket: Bucket, scale: float, stats: StepStats) -> None:
    """Write the reduced entries, times `scale`, and zeros elsewhere."""
    assert bucket.reduced is not None
    with stats.timed("decode_s"):
        bucket.reduced.write(bucket.decoded, scale)
    bucket.reduced = None
