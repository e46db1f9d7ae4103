"""Lines are made to ranks alone, whatever strangers do meanwhile."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from hvd_sparse.errors import TransportTimeout
from hvd_sparse.transports import lines
from hvd_sparse.transports.lines import Address, Line, connect_lines
from hvd_sparse.transports.meeting import listen
from tests.transports.failures import no_descriptors

pytestmark = pytest.mark.timeout(60)

TOKEN = bytes(range(16))


@contextmanager
def connected(
    listeners: list[socket.socket], token: bytes = TOKEN, limit_s: float = 20.0
) -> Iterator[list[dict[int, Line]]]:
    """The lines of ranks that are threads, by rank."""
    addresses: dict[int, Address] = {r: one.getsockname() for r, one in enumerate(listeners)}

    def rank(r: int) -> dict[int, Line]:
        others = {peer: address for peer, address in addresses.items() if peer != r}
        return connect_lines(r, listeners[r], others, token, limit_s)

    with ThreadPoolExecutor(len(listeners)) as pool, ExitStack() as opened:
        found = list(pool.map(rank, range(len(listeners))))
        for line in (line for mine in found for line in mine.values()):
            opened.callback(line.close)
        yield found


def received(line: Line) -> list[dict[str, int]]:
    deadline = time.monotonic() + 10.0
    while not (found := line.receive()) and line.ended is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def assert_all_talk(found: list[dict[int, Line]]) -> None:
    for r, mine in enumerate(found):
        assert sorted(mine) == [peer for peer in range(len(found)) if peer != r]
        for peer, line in mine.items():
            line.send({"from": r})
            assert received(found[peer][r]) == [{"from": r}]


NOISE = {
    "nothing": b"",
    "garbage": os.urandom(36),
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "half a handshake": bytes(20),
    "a huge length": struct.pack("!Q", 1 << 60) + bytes(100),
    "a megabyte": bytes(1 << 20),
    "a rank and a wrong proof": struct.pack("!I", 2) + bytes(32),
    "a rank that is none": struct.pack("!I", 1 << 31) + bytes(32),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
@pytest.mark.parametrize("count", [1, 3 * lines.STRANGERS])
def test_strangers_take_no_ranks_place(noise: bytes, count: int) -> None:
    """Not those that stay, either: they come first, and wait in the listener's queue."""
    listeners = [listen("127.0.0.1") for _ in range(3)]
    with ExitStack() as strangers:
        for listener in listeners[:2]:
            for _ in range(count):
                stranger = strangers.enter_context(socket.create_connection(listener.getsockname()))
                stranger.setblocking(False)
                with suppress(OSError):
                    stranger.send(noise)
        with connected(listeners) as found:
            assert_all_talk(found)
            for listener in listeners:  # and nothing listens any more
                assert listener.fileno() == -1


def test_a_stranger_in_a_ranks_place_is_not_taken_for_it() -> None:
    """As where a rank has died, and another process has got its port and answers."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        accepting = threading.Thread(
            target=lambda: stranger.accept()[0].sendall(bytes(32)), daemon=True
        )
        accepting.start()
        with pytest.raises(TransportTimeout, match=r"ranks \[0\] did not connect to rank 1"):
            connect_lines(1, listen("127.0.0.1"), {0: stranger.getsockname()}, TOKEN, 1.0)


def test_who_is_missing_is_named() -> None:
    with pytest.raises(TransportTimeout, match=r"ranks \[1, 2\] did not connect to rank 0 in time"):
        connect_lines(0, listen("127.0.0.1"), {1: ("", 0), 2: ("", 0)}, TOKEN, 0.3)


def test_a_missing_descriptor_is_named_and_waited_for() -> None:
    listeners = [listen("127.0.0.1") for _ in range(2)]
    address = {0: listeners[0].getsockname()}
    selector = lines.selectors.SelectSelector  # takes no descriptor itself
    with pytest.MonkeyPatch.context() as patched, no_descriptors():
        patched.setattr(lines.selectors, "DefaultSelector", selector)
        with pytest.raises(TransportTimeout, match=r"did not connect .*: Too many open files"):
            connect_lines(1, listeners[1], address, TOKEN, 0.3)
    with connected([listeners[0], listen("127.0.0.1")]) as found:
        assert_all_talk(found)


def test_proofs_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one is judged once all of it is there, in constant time: no byte is learnt."""
    judged: list[bytes] = []
    compare = lines.hmac.compare_digest
    monkeypatch.setattr(
        lines.hmac, "compare_digest", lambda a, b: judged.append(a) or compare(a, b)
    )
    listeners = [listen("127.0.0.1") for _ in range(2)]
    right = lines.hmac.digest(TOKEN, struct.pack("!II", 1, 0), "sha256")
    guesses = [right[:n] for n in (1, 31)] + [right[:31] + bytes([right[31] ^ 1])]
    with ExitStack() as strangers:
        for guess in guesses:
            stranger = socket.create_connection(listeners[0].getsockname())
            strangers.enter_context(stranger).sendall(struct.pack("!I", 1) + guess)
        with connected(listeners) as found:
            assert_all_talk(found)
    assert sorted(map(len, judged)) == [32] * 3  # one guess, and the two ends of the line


def test_an_end_says_why() -> None:
    with connected([listen("127.0.0.1") for _ in range(3)]) as found:
        found[0][1].close()
        assert received(found[1][0]) == []
        assert found[1][0].ended == "its process has ended, or has closed the transport"
        for _ in range(10_000):  # to one that does not read
            found[0][2].send({"tell": ["transport", "x" * 2000]})
        assert found[0][2].ended == "it does not read what it is told"
