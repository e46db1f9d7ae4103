"""Headers, capacities, pooled memory, and ranks that make different calls."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_sparse.errors import HvdSparseError, PeerLostError, PlanError
from hvd_sparse.transports import Transport, framing, run_ranks
from hvd_sparse.transports.framing import POOLED_BYTES, BufferPool, Context
from tests.transports.test_connect import over_gloo

pytestmark = pytest.mark.timeout(60)


@given(st.integers(0, 1 << 44))
def test_a_capacity_has_room_and_wastes_little(nbytes: int) -> None:
    capacity = framing.next_capacity(nbytes)
    assert capacity >= framing.HEADER_BYTES + nbytes + nbytes * 11 // 50
    assert capacity <= max(framing.MIN_CAPACITY_BYTES, (framing.HEADER_BYTES + nbytes) * 5 / 4 + 1)


@given(st.integers(0, 1 << 44), st.integers(0, 1 << 44))
def test_capacities_have_codes_of_their_own(a: int, b: int) -> None:
    first, second = framing.next_capacity(a), framing.next_capacity(b)
    codes = framing.capacity_code(first), framing.capacity_code(second)
    assert (first == second) == (codes[0] == codes[1])
    assert max(codes) < 1 << framing.CAPACITY_CODE_BITS


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 0xFFFF))
def test_a_header_comes_back(call: int, step: int, bucket: int) -> None:
    stamp = framing.stamp(call, step, bucket)
    message = framing.frame((torch.zeros(3),), 12, 0xABCD, stamp, BufferPool())
    assert message.numel() == framing.HEADER_BYTES + 12
    assert framing.read_header(message) == (12, 0xABCD, stamp)
    assert framing.read_stamp(stamp) == (call & 0xFFFF, step & 0xFFFF_FFFF, bucket)


def outcomes(rank: Callable[[Transport], None]) -> list[HvdSparseError]:
    """What the ranks raise, over gloo."""

    def run(t: Transport) -> HvdSparseError:
        with pytest.raises(HvdSparseError) as caught:
            rank(t)
        return caught.value

    return over_gloo(3, run, timeout_s=5.0)


def warmed(t: Transport, nbytes: int) -> None:
    """Makes the ranks expect messages of this size on channel c."""
    t.context = Context("a", 7)
    t.allgather((torch.zeros(nbytes, dtype=torch.uint8),), channel="c")


@pytest.mark.parametrize(
    ("channel", "context", "reason"),
    [
        ("d", Context("a", 7), "on another channel"),
        ("c", Context("b", 7), "for another bucket"),
        ("c", Context("a", 8), r"of step [78]"),  # whoever looks first
    ],
)
@pytest.mark.parametrize("nbytes", [8, 100_000])
def test_different_calls_end_in_an_error_that_names_them(
    channel: str, context: Context, reason: str, nbytes: int
) -> None:
    """On one rank of three; small messages, and such as were longer than the other's buffer."""

    def rank(t: Transport) -> None:
        warmed(t, nbytes)
        if t.rank == 1:
            t.context = context
        for _ in range(2):
            t.allgather(
                (torch.zeros(nbytes, dtype=torch.uint8),), channel=channel if t.rank == 1 else "c"
            )

    errors = outcomes(rank)
    assert any(isinstance(error, PlanError) for error in errors), errors
    told = " ".join(map(str, errors))
    assert "the ranks make different calls" in told
    if nbytes == 8:
        assert re.search(reason, told), told
        assert re.search(r"in call \d+ on channel '\w' \(bucket '[ab]', step [78]\)", told), told


def test_an_additional_call_on_one_rank_is_noticed() -> None:
    def rank(t: Transport) -> None:
        warmed(t, 100_000)
        if t.rank == 2:
            t.exchange((torch.zeros(9),), 0, None, channel="more")
        t.allgather((torch.zeros(100_000, dtype=torch.uint8),), channel="c")
        t.allgather((torch.zeros(100_000, dtype=torch.uint8),), channel="c")

    errors = outcomes(rank)
    assert any(isinstance(error, PlanError) for error in errors), errors


def test_buckets_that_alternate_on_one_channel_are_not_cut() -> None:
    def rank(t: Transport) -> int:
        dst, src = (t.rank + 1) % 2, (t.rank - 1) % 2
        for step in range(3):
            if step == 1:
                before = t.traffic.snapshot()
            for bucket, nbytes in (("large", 90_000), ("small", 10)):
                t.context = Context(bucket, step)
                payload = (torch.zeros(nbytes, dtype=torch.uint8),)
                t.exchange(payload, dst, src, channel="c").wait()
        return t.traffic.since(before).messages_sent

    assert run_ranks(2, rank, timeout_s=10.0) == [4, 4]


def test_a_reason_reaches_the_peers() -> None:
    def rank(t: Transport) -> None:
        if t.rank == 0:
            t.abort(ValueError("of mine"))
        t.allreduce_sum(torch.ones(1), channel="c")

    with pytest.raises(PeerLostError, match=r"rank 0 aborted the transport: ValueError\('of mine'"):
        run_ranks(2, rank, timeout_s=10.0)


# -- memory that is used again only when nobody holds it


@pytest.mark.parametrize("nbytes", [0, 1, POOLED_BYTES - 1, POOLED_BYTES, 100_001, 1 << 20])
def test_sizes_and_alignment(nbytes: int) -> None:
    taken = BufferPool().take(nbytes)
    assert taken.dtype == torch.uint8
    assert taken.numel() == nbytes
    assert taken.data_ptr() % 16 == 0


def test_memory_returns_when_the_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(100_000)
    address = first.data_ptr()
    view = first[8:].view(torch.float64)[3:5]
    del first
    second = pool.take(100_000)
    assert second.data_ptr() != address
    del view
    assert pool.take(90_000).data_ptr() == address


def test_other_ways_of_holding_count_too() -> None:
    pool = BufferPool()
    for hold in (
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: t.view(torch.int32).split(10),
        lambda t: t.detach(),
        lambda t: memoryview(t.numpy()),
    ):
        first = pool.take(POOLED_BYTES)
        address = first.data_ptr()
        held = hold(first)
        del first
        assert pool.take(POOLED_BYTES).data_ptr() != address
        del held
        assert pool.take(POOLED_BYTES).data_ptr() == address


def test_held_content_is_never_overwritten() -> None:
    pool = BufferPool()
    held = []
    for number in range(50):
        taken = pool.take(POOLED_BYTES + 1_000 * number)
        taken.fill_(number)
        if number % 3 == 0:
            held.append((number, taken[number:]))
    for number, view in held:
        assert torch.equal(view, torch.full_like(view, number))


def test_what_is_kept_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "LIMIT_BYTES", 4 * POOLED_BYTES)
    pool = BufferPool()
    held = [pool.take(POOLED_BYTES) for _ in range(4)]
    over = pool.take(POOLED_BYTES)  # not the pool's own
    assert len({t.data_ptr() for t in [*held, over]}) == 5
    held.clear()
    large = pool.take(4 * POOLED_BYTES)  # takes the place of the four
    address = large.data_ptr()
    del large
    assert pool.take(4 * POOLED_BYTES).data_ptr() == address
    assert pool._kept_bytes == 4 * POOLED_BYTES
