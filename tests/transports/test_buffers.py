"""Memory that is used again only when nobody holds it."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.transports import framing as buffers
from hvd_sparse.transports.framing import POOLED_BYTES, BufferPool


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
        held = hold(pool.take(POOLED_BYTES))
        taken = [pool.take(POOLED_BYTES) for _ in range(4)]
        addresses = {t.data_ptr() for t in taken}
        assert len(addresses) == 4
        taken[0].zero_()
        for t in taken[1:]:
            t.fill_(1)
        del t, taken, held


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
    monkeypatch.setattr(buffers, "LIMIT_BYTES", 4 * POOLED_BYTES)
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
