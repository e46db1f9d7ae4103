"""The watch over peers, with threads in place of processes: one that does not answer is a thread
whose watch is held."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import threading
import time
from typing import Any

import pytest
import torch

from hvd_sparse.errors import HvdSparseError, PeerLostError, TransportError, TransportTimeout
from hvd_sparse.transports import Context, Transport
from hvd_sparse.transports.gloo import GlooTransport
from hvd_sparse.transports.questions import TOKEN_BYTES, Questions, ask_at_once
from hvd_sparse.transports.watch import Watch
from tests.transports.test_connect import over_gloo

pytestmark = pytest.mark.timeout(60)

TOKEN = bytes(range(TOKEN_BYTES))


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
            watch_of(t)._questions._answer = lambda question: released.wait(20.0)  # type: ignore[assignment,return-value]
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


def test_a_question_that_was_lost_is_asked_anew() -> None:
    """As in a network that is gone for a while: nothing ends its connection."""
    meet = threading.Barrier(2, timeout=20.0)
    lost: list[socket.socket] = []

    def rank(t: Transport) -> None:
        questions = watch_of(t)._questions
        read = questions._read_question

        def lose_the_first(connection: socket.socket) -> None:
            if lost:
                read(connection)
                return
            lost.append(connection)
            del questions._incoming[connection]
            questions._selector.unregister(connection)

        if t.rank == 1:
            questions._read_question = lose_the_first  # type: ignore[method-assign]
        meet.wait()
        if t.rank == 1:
            time.sleep(4.0)
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2

    over_gloo(2, rank, timeout_s=2.0)
    assert lost
    lost[0].close()


def test_a_busy_peer_is_given_up_where_it_shall_be() -> None:
    meet = threading.Barrier(2, timeout=20.0)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            error = error_of(t, 1)
            assert isinstance(error, TransportTimeout)
            assert "busy_timeout_s=1" in str(error)
            assert "rank 1 is alive, and busy elsewhere" in str(error)
        meet.wait()

    over_gloo(2, rank, timeout_s=0.5, busy_timeout_s=1.0)


def test_a_closed_port_means_that_the_peer_is_gone() -> None:
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


def test_strangers_are_neither_answered_nor_remembered() -> None:
    def rank(t: Transport) -> None:
        watch = watch_of(t)
        address = watch._addresses[t.rank]
        assert address is not None
        wrong = os.urandom(TOKEN_BYTES) + b'{"from": 0, "tell": ["transport", "a lie"]}\n'
        for noise in (os.urandom(100_000), b"GET / HTTP/1.0\r\n\r\n", wrong, b""):
            with socket.create_connection(address, timeout=10.0) as stranger:
                stranger.settimeout(10.0)
                try:
                    stranger.sendall(noise)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(1) == b""
                except OSError:  # closed before all was sent
                    continue
        quiet = [socket.create_connection(address, timeout=10.0) for _ in range(50)]
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2
        for connection in quiet:
            connection.close()
        deadline = time.monotonic() + 4.0  # before a silent connection is dropped anyway
        while watch._questions._incoming:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    over_gloo(2, rank, timeout_s=5.0)


def test_a_question_that_makes_no_sense_does_no_harm() -> None:
    def rank(t: Transport) -> None:
        watch = watch_of(t)
        address = watch._addresses[t.rank]
        assert address is not None
        for question in ({}, {"from": 1, "tell": 7}, {"from": 1, "ask": []}):
            with socket.create_connection(address, timeout=10.0) as peer:
                peer.sendall(watch._token + str(question).replace("'", '"').encode() + b"\n")
                peer.settimeout(10.0)
                peer.recv(1)
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2

    over_gloo(2, rank, timeout_s=5.0)


def test_a_transport_that_is_let_go_takes_its_watch_along() -> None:
    threads: list[threading.Thread] = []

    def rank(t: Transport) -> None:
        threads.append(watch_of(t)._thread)

    over_gloo(2, rank)
    gc.collect()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()


def test_answers_and_refusals() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    questions = Questions(TOKEN, server, lambda question: {"twice": 2 * question["n"]})
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            questions.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    closed = socket.create_server(("127.0.0.1", 0))
    refusing: Any = closed.getsockname()
    closed.close()
    try:
        heard = ask_at_once(TOKEN, [address, address, refusing], {"n": 21}, 5.0, answers=True)
        assert sorted(heard, key=str) == [
            (None, True),
            ({"twice": 42}, False),
            ({"twice": 42}, False),
        ]
        assert ask_at_once(bytes(TOKEN_BYTES), [address], {"n": 1}, 5.0, answers=True) == [
            (None, False)
        ]
    finally:
        ended.set()
        questions.wake()
        thread.join(5.0)
        questions.close()


def test_an_error_of_the_watch_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=20.0)

    def broken(self: Watch, *arguments: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Watch, "_choose_whom_to_ask", broken)

    def rank(t: Transport) -> None:
        if t.rank == 0:
            error = error_of(t, 1)
            assert isinstance(error, TransportError)
            assert "the watch over its peers failed: KeyError('broken')" in str(error)
        meet.wait()

    over_gloo(2, rank, timeout_s=0.5)
