"""ExDyna's partitions, and what it takes to exchange by them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hvd_sparse.collectives import ExDyna
from hvd_sparse.collectives.exdyna import Partitions, widened
from hvd_sparse.errors import MessageError
from hvd_sparse.selectors import OnlineThreshold
from hvd_sparse.streams import SparseStream
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks
from tests.laws.buckets import bucket_of, step_of


def levelled(indices: Tensor, count: int = 4, numel: int = 1024 * 32) -> Partitions:
    """Partitions after some steps in which the same indices were selected."""
    partitions = Partitions(numel, count)
    for _ in range(20):
        partitions.level(indices.to(torch.int32))
    return partitions


@pytest.mark.parametrize("hot", [0, 1, 521, 1022, 1023])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_one_hot_block_leaves_no_rank_without_a_partition(hot: int, count: int) -> None:
    """min_blk of algorithm 3."""
    everywhere = torch.arange(0, 1024, 4) * 32
    partitions = levelled(torch.cat([everywhere, hot * 32 + torch.arange(32)]).unique(), count)
    only = levelled(hot * 32 + torch.arange(32), count)
    for blocks in (partitions.blocks, only.blocks):
        assert min(blocks) >= 1
        assert sum(blocks) == 1024


def test_few_hot_blocks_are_shared_by_all_ranks() -> None:
    """A larger min_blk would leave them to one rank: f(t) = P."""
    partitions = levelled(torch.arange(500 * 32, 508 * 32))
    spans = [partitions.span(i) for i in range(4)]
    held = [max(0, min(b, 508 * 32) - max(a, 500 * 32)) for a, b in spans]
    assert sum(held) == 8 * 32
    assert max(held) <= 3 * 32


def test_controllers_as_written() -> None:
    """Algorithm 3 moves one block a step, and algorithm 5 the threshold by a fixed factor."""
    partitions = Partitions(1024 * 32, 4)
    for selected, blocks in (
        ([300, 100, 100, 100], [255, 257, 256, 256]),
        ([100, 100, 100, 300], [255, 257, 257, 255]),
        ([100, 104, 100, 99], [255, 257, 257, 255]),
    ):
        partitions.move(selected)
        assert partitions.blocks == blocks
    for _ in range(500):
        partitions.move([9000, 1, 1, 1])
    assert partitions.blocks[0] == 64  # min_blk = n_b / 4P

    def worker(transport: Transport) -> list[float]:
        collective = ExDyna(transport, 1000, 100, as_written=True)
        thresholds = []
        for scale in (1.0, 1.0, 100.0, 0.01):
            start, stop = collective.scope().start, collective.scope().stop
            values = torch.arange(start, stop).float() * scale
            indices = torch.arange(start, stop, dtype=torch.int32)
            collective.reduce(SparseStream(indices, values, 1000), lambda at: torch.zeros(len(at)))
            thresholds.append(collective.threshold)
        return [after / before for before, after in pairwise(thresholds)]

    for factors in run_ranks(2, worker):
        assert factors == pytest.approx([1.00125, 1.005, 0.995])


@pytest.mark.parametrize(
    ("edges", "least", "widths"),
    [
        ([0, 5, 5, 9], 1, [5, 1, 3]),
        ([0, 9, 9, 9], 1, [7, 1, 1]),
        ([0, 0, 0, 9], 1, [1, 1, 7]),
        ([0, 0, 0, 2], 0, [0, 0, 2]),
        ([0, 3, 6, 9], 3, [3, 3, 3]),
    ],
)
def test_widened(edges: list[int], least: int, widths: list[int]) -> None:
    assert widened(edges, least) == widths


def messages_of_steps(transport: Transport, steps: int) -> list[int]:
    """The messages that a rank sends in each step of a training on noise."""
    numel, k = 100_000, 2000
    bucket = bucket_of(transport, numel, k, OnlineThreshold, ExDyna)
    generator = torch.Generator().manual_seed(transport.rank)
    sent = []
    for _ in range(steps):
        before = transport.traffic.snapshot()
        g = torch.randn(numel, generator=generator) ** 3
        reduction = step_of(bucket, [g])[1]
        assert abs(reduction.reduced.nnz - k) <= 0.1 * k
        sent.append(transport.traffic.since(before).messages_sent)
    return sent


def test_a_step_is_an_allgather_and_an_allreduce() -> None:
    """As in algorithm 1: the counters travel with the indices.

    The allreduce is an exchange of slices and an allgather of sums. Where a density is off by a
    tenth, indices are gathered once more.
    """
    sent = run_ranks(3, lambda t: messages_of_steps(t, 40), timeout_s=60.0)[0][10:]
    to_each_peer = [messages / 2 for messages in sent]
    assert set(to_each_peer) <= {3.0, 4.0}
    assert to_each_peer.count(3.0) >= 24


def test_a_message_of_levels_that_is_cut_short_is_refused() -> None:
    def worker(transport: Transport) -> None:
        collective = ExDyna(transport, 1000, 10)
        inner = transport.allgather
        transport.allgather = lambda *a, **b: [m[:8] for m in inner(*a, **b)]  # type: ignore[method-assign]
        indices = torch.zeros(0, dtype=torch.int32)
        with pytest.raises(MessageError, match="levels must have at least 520 bytes, got 8"):
            collective._gather_with_counts(indices, torch.zeros(65, dtype=torch.int64))

    run_ranks(2, worker, timeout_s=60.0)
