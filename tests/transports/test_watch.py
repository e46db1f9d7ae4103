"""The watch over peers, with threads in place of processes: one that does not answer is a thread
whose watch is held."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time
from typing import Any

import pytest
import torch

from hvd_sparse.errors import HvdSparseError, PeerLostError, TransportError, TransportTimeout
from hvd_sparse.transports import Context, Transport
from hvd_sparse.transports.gloo import GlooTransport
from hvd_sparse.transports.watch import Watch
from tests.transports.failures import no_descriptors
from tests.transports.test_connect import over_gloo

pytestmark = pytest.mark.timeout(60)


def watch_of(t: Transport) -> Watch:
    assert isinstance(t, GlooTransport)
    assert isinstance(t.watch, Watch)
    return t.watch


def error_of(t: Transport, src: int) -> HvdSparseError:
    with pytest.raises(HvdSparseError) as caught:
        t.exchange(None, None, src, channel="c").wait()
    return caught.value


def test_a_peer_that_does_not_answer_is_given_up_and_all_hear_why() -> None:
    meet, errors = threading.Barrier(4, timeout=20.0), {}

    def rank(t: Transport) -> None:
        t.context = Context("layer.weight", 12)
        meet.wait()
        if t.rank == 3:
            released = threading.Event()
            watch_of(t)._answer = lambda *question: released.wait(20.0)  # type: ignore[method-assign,return-value,assignment]
            meet.wait()
            released.set()
            return
        start = time.monotonic()
        errors[t.rank] = error_of(t, 3 if t.rank == 0 else t.rank - 1)
        assert time.monotonic() - start < 5.0
        with pytest.raises(type(errors[t.rank]), match="of no more use"):
            t.exchange(None, None, 3, channel="c")
        meet.wait()

    over_gloo(4, rank, timeout_s=[0.5, 30.0, 30.0, 30.0])
    assert isinstance(errors[0], TransportTimeout)
    cause = "rank 0: rank 3 did not answer within 0.5 s: it is stopped"
    for peer in (0, 1, 2):
        assert cause in str(errors[peer])
        assert "rank 0 has waited 0." in str(errors[peer])
        assert "from rank 3 in call 0 on channel 'c' (bucket 'layer.weight', step 12)" in str(
            errors[peer]
        )
    assert isinstance(errors[1], PeerLostError)


def test_a_busy_peer_is_waited_for_and_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "hvd_sparse")

    def rank(t: Transport) -> None:
        if t.rank == 0:
            time.sleep(2.0)  # four times its timeout
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 3

    over_gloo(3, rank, timeout_s=0.5)
    warnings = [r.getMessage() for r in caplog.records if r.name == "hvd_sparse"]
    told = [w for w in warnings if "rank 0 is alive, and busy elsewhere" in w]
    assert len(told) >= 2, warnings
    assert re.search(r"for (a message from|room for a message at) rank 0 in call \d", told[0])


def test_a_busy_peer_is_waited_for_with_the_rest_of_a_message() -> None:
    """It has made the call, but takes the rest of what outgrew its room only when it waits."""

    def rank(t: Transport) -> None:
        handle = t.exchange([torch.ones(1 << 20)], 1 - t.rank, 1 - t.rank, channel="c")
        if t.rank == 0:
            time.sleep(2.0)  # four times its timeout
        assert handle.received().numel() == 4 << 20

    over_gloo(2, rank, timeout_s=0.5)


def test_a_report_that_cannot_be_written_ends_nothing() -> None:
    """As by a handler of the script's own, on a full disk."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed.append(record)
            raise OSError("No space left on device")

    failed: list[logging.LogRecord] = []
    handler = Broken(logging.WARNING)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            time.sleep(2.0)
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2
        assert watch_of(t)._thread.is_alive()

    logger = logging.getLogger("hvd_sparse")
    logger.addHandler(handler)
    try:
        over_gloo(2, rank, timeout_s=0.5)
    finally:
        logger.removeHandler(handler)
    assert failed


@pytest.mark.parametrize(("busy_timeout_s", "bound_s"), [(1.0, 1.0), (None, 5.0)])
def test_a_busy_peer_is_given_up_in_the_end(busy_timeout_s: float | None, bound_s: float) -> None:
    """By default after ten times `timeout_s`: it has made a step less, or will never be done."""
    meet = threading.Barrier(2, timeout=20.0)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            start = time.monotonic()
            error = error_of(t, 1)
            assert bound_s <= time.monotonic() - start < bound_s + 3.0
            assert isinstance(error, TransportTimeout)
            assert f"busy_timeout_s={bound_s:g}" in str(error)
            assert "rank 1 is alive, and busy elsewhere" in str(error)
        meet.wait()

    over_gloo(2, rank, timeout_s=0.5, busy_timeout_s=busy_timeout_s)


def test_a_message_that_is_lost_ends_the_wait_though_its_sender_lives() -> None:
    meet = threading.Barrier(2, timeout=20.0)

    class Sent:
        def wait(self, deadline: float) -> None:
            return None

    def rank(t: Transport) -> None:
        assert isinstance(t, GlooTransport)
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2
        if t.rank == 0:
            start = time.monotonic()
            error = error_of(t, 1)
            assert time.monotonic() - start < 4.0
            assert isinstance(error, TransportTimeout)
            assert "which has made that call too, and no byte has come or gone" in str(error)
            assert "message from rank 1 in call 1 on channel 'c'" in str(error)
        else:
            t._isend = lambda *message: Sent()  # type: ignore[method-assign]
            t.exchange((torch.ones(1),), 0, None, channel="c").wait()
        meet.wait()

    over_gloo(2, rank, timeout_s=1.0)


def test_a_line_that_has_ended_means_that_the_peer_is_gone() -> None:
    meet = threading.Barrier(2, timeout=20.0)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            error = error_of(t, 1)
            assert isinstance(error, PeerLostError)
            assert "its process has ended, or has closed the transport" in str(error)
        else:
            watch_of(t).close()
        meet.wait()

    over_gloo(2, rank, timeout_s=0.5)


def test_what_fails_first_is_what_all_report() -> None:
    def rank(t: Transport) -> str:
        if t.rank == 4:
            t.abort(ValueError("of rank 4"))
        return str(error_of(t, (t.rank + 1) % 7))

    for says in over_gloo(7, rank, timeout_s=20.0):
        assert "rank 4 aborted the transport: ValueError('of rank 4')" in says


def test_who_was_stopped_itself_does_not_blame_its_peers() -> None:
    def rank(t: Transport) -> None:
        if t.rank == 0:
            threading.Timer(0.3, sleep_of_the_watch, [watch_of(t)]).start()
        else:
            time.sleep(2.5)
        t.allreduce_sum(torch.ones(1), channel="c")

    def sleep_of_the_watch(watch: Watch) -> None:
        watch._looked_at -= 100.0  # as if nothing had run for so long

    over_gloo(2, rank, timeout_s=0.5)


NONSENSE = (b'{"ask": 0', b"[" * 50_000, b"\xff", b"7", b'{"tell": 7}', b"{}")


@pytest.mark.parametrize("nonsense", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_ends_its_line_and_nothing_else(nonsense: bytes) -> None:
    def rank(t: Transport) -> None:
        if t.rank == 1:
            watch_of(t)._lines[0].connection.sendall(nonsense + b"\n")
        if t.rank == 0:
            deadline = time.monotonic() + 10.0
            while watch_of(t)._lines[1].ended is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert watch_of(t)._lines[1].ended == "it sent what no rank sends"
            assert watch_of(t)._lines[2].ended is None
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 3

    over_gloo(3, rank, timeout_s=20.0)


@pytest.mark.parametrize("told", [b'{"tell": [1, {"a": 2}]}', b'{"tell": ["plan", null]}'])
def test_a_cause_that_is_no_text_ends_the_waits_too(told: bytes) -> None:
    meet = threading.Barrier(2, timeout=20.0)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            assert "rank 0: rank 1 gave up: " in str(error_of(t, 1))
        else:
            watch_of(t)._lines[0].connection.sendall(told + b"\n")
        meet.wait()

    over_gloo(2, rank, timeout_s=3.0)


def test_a_rank_without_descriptors_waits_and_answers() -> None:
    """A busy peer is asked, and asks, while none can be opened."""

    def rank(t: Transport) -> None:
        if t.rank == 1:
            with no_descriptors():
                time.sleep(2.0)
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2

    over_gloo(2, rank, timeout_s=0.5)


def test_a_transport_that_is_let_go_takes_its_watch_along() -> None:
    threads: list[threading.Thread] = []

    def rank(t: Transport) -> None:
        threads.append(watch_of(t)._thread)

    over_gloo(2, rank)
    gc.collect()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def test_an_error_of_the_watch_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=20.0)

    def broken(self: Watch, *arguments: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Watch, "_reason_to_give_up", broken)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            error = error_of(t, 1)
            assert isinstance(error, TransportError)
            assert "the watch over its peers failed: KeyError('broken')" in str(error)
        meet.wait()

    over_gloo(2, rank, timeout_s=0.5)
