"""What gloo leaves open, and its transport bounds: lost sends, dead connections, strangers."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import nullcontext, suppress

import pytest
import torch

from hvd_sparse.errors import PeerLostError, TransportError
from hvd_sparse.transports import LocalTransport, Transport, run_ranks
from hvd_sparse.transports.connect import create_transport
from hvd_sparse.transports.gloo import GlooTransport, _borrowed, _ends_in, take_nothing
from hvd_sparse.transports.meeting import MeetingStore
from tests.transports.failures import no_descriptors
from tests.transports.pairs import PairWorld, borrowed, run_pair
from tests.transports.test_connect import ThreadBootstrap, over_gloo

pytestmark = pytest.mark.timeout(120)

ROUNDS = int(os.environ.get("HVD_SPARSE_ABORTS", "10"))
"""`make faults` runs 2,000."""

END_S = 10.0
"""A wait has ended so long after its transport was given up, on a busy machine too."""

PROBES = 600


def give_up_at_random(world: PairWorld) -> None:
    """In each round a thread sums, a connection breaks at some moment, and both ranks abort."""
    moments = random.Random(world.rank)
    for number in range(ROUNDS):
        transport = create_transport("gloo", world, 60.0)
        assert isinstance(transport, GlooTransport)

        def work(transport: Transport = transport) -> None:
            with suppress(TransportError):
                while True:
                    transport.allreduce_sum(torch.ones(1), channel="c")

        thread = threading.Thread(target=work, daemon=True)
        world.meet()
        thread.start()
        time.sleep(0.006 * moments.random())
        if number % 3 == world.rank:
            with borrowed(transport._sockets.connected) as connections:
                for connection in connections:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.01)
        transport.abort("it was time")
        thread.join(END_S)
        assert not thread.is_alive(), f"round {number}: the wait goes on"
        transport.close()
        world.meet()
    print(f"all waits ended in {ROUNDS} rounds", flush=True)


@pytest.mark.slow
@pytest.mark.timeout(max(120, ROUNDS))
def test_a_wait_ends_whenever_its_transport_is_given_up() -> None:
    said = run_pair(give_up_at_random, limit_s=max(100, ROUNDS))
    assert all("all waits ended" in words for words in said), "\n".join(said)


def test_sockets_of_others_go_on_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the process are looked at, and some libraries set a default timeout."""
    ours, other = socket.socketpair()
    with ours, other:
        socket.setdefaulttimeout(30.0)
        try:
            with _borrowed(ours.fileno()) as end:
                assert end.getsockname() == ours.getsockname()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(ours.fileno())


def test_a_connection_that_the_network_drops_ends_both_waits() -> None:
    """The watch's line goes on: each rank hears that the other is alive."""
    took: dict[int, float] = {}
    dropped = threading.Barrier(2, timeout=20.0)

    def rank(t: Transport) -> None:
        t.allreduce_sum(torch.ones(1), channel="c")
        if t.rank == 0:
            with borrowed(t._sockets.connected) as connections:  # type: ignore[attr-defined]
                for connection in connections:  # both ends of it, in this process
                    take_nothing(connection)
        dropped.wait()
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"rank \d (lost|has waited|gave up|did not)") as e:
            t.allreduce_sum(torch.ones(1), channel="c")
        took[t.rank] = time.monotonic() - start
        assert f"rank {1 - t.rank}" in str(e.value)

    over_gloo(2, rank, timeout_s=2.0)
    assert max(took.values()) < 2 * 2.0 + 3.0, took


def leave_a_child_behind(world: PairWorld, *when: str) -> None:
    """Rank 1 forks a child that goes on, and is killed; rank 0 waits for its message."""
    transport = create_transport("gloo", world, 20.0)
    transport.allreduce_sum(torch.ones(1), channel="c")
    world.meet()
    if world.rank == 1:
        if when == ("in an exchange",):
            transport.exchange(None, None, 0, channel="c")
        if os.fork() == 0:
            world._peer.close()
            for descriptor in (1, 2):
                os.close(descriptor)
            time.sleep(15.0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 0 lost the connection to rank 1"):
        transport.exchange(None, None, 1, channel="c").wait()
    print(f"noticed after {time.monotonic() - start:.1f} s", flush=True)


@pytest.mark.parametrize("when", ["between two exchanges", "in an exchange"])
def test_a_death_is_noticed_while_forked_children_live(when: str) -> None:
    said = run_pair(leave_a_child_behind, when)[0]
    found = re.search(r"noticed after ([\d.]+) s", said)
    assert found is not None, said
    assert float(found[1]) < 5.0


def test_a_port_scanner_costs_nothing() -> None:
    """Gloo would keep a descriptor for each stranger, and end the process once there is none."""

    def rank(t: Transport) -> None:
        assert isinstance(t, GlooTransport)
        t.allreduce_sum(torch.ones(1), channel="c")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(PROBES if t.rank == 0 else 0):
            for host, port in sorted(_ends_in(t._store.entries.values())):  # type: ignore[attr-defined]
                with socket.socket() as probe:
                    probe.setblocking(False)
                    probe.connect_ex((host, port))
        assert t.allreduce_sum(torch.ones(1), channel="c").item() == 2
        assert len(os.listdir("/proc/self/fd")) <= before + 8

    over_gloo(2, rank)


def test_missing_descriptors_are_named_while_ranks_connect() -> None:
    meeting = MeetingStore(lambda entries: [entries])
    with no_descriptors(), pytest.raises(TransportError, match="Too many open files"):
        GlooTransport(0, 1, meeting, host="127.0.0.1", timeout_s=5.0)


def test_what_could_not_connect_ends_quietly_with_its_process() -> None:
    """The traceback of the error keeps it."""
    meeting = MeetingStore(lambda entries: [entries])
    with no_descriptors(), pytest.raises(TransportError) as caught:
        GlooTransport(0, 2, meeting, host="127.0.0.1", timeout_s=5.0)
    transport = caught.traceback[-1].frame.f_locals["self"]
    assert transport.leave(caught.value)
    transport.close()
    transport.disown()


def connect_without_descriptors(world: PairWorld) -> None:
    """Rank 1 can open nothing, from the beginning on."""
    lacking = no_descriptors() if world.rank == 1 else nullcontext()
    with lacking, pytest.raises(TransportError) as caught:
        create_transport("gloo", world, 20.0)
    print(caught.value, flush=True)
    world.meet()


def test_descriptors_that_are_missing_from_the_beginning_are_named_on_all_ranks() -> None:
    start = time.monotonic()
    for said in run_pair(connect_without_descriptors):
        assert "rank 1 could not connect: [Errno 24] Too many open files" in said, said
    assert time.monotonic() - start < 20.0


def start_no_thread(world: PairWorld, name: str) -> None:
    """Rank 1 can start no thread, as at a limit, from some moment on."""

    def sums() -> None:
        limit = 1 << 46 if world.rank == 1 else 0
        if name == "watch":
            threading.stack_size(limit)
        transport = create_transport("gloo", world, 20.0)
        threading.stack_size(limit)
        for _ in range(2):  # a wait of rank 0's own
            transport.allreduce_sum(torch.ones(1), channel="c")

    with pytest.raises(TransportError, match=r"rank 1.*no thread could be started") as caught:
        sums()
    print(caught.value, flush=True)
    world.meet()


@pytest.mark.parametrize("name", ["watch", "sends"])
def test_a_thread_that_cannot_be_started_is_named_on_all_ranks(name: str) -> None:
    start = time.monotonic()
    for said in run_pair(start_no_thread, name):
        assert f"no thread could be started for 'hvd_sparse {name}'" in said, said
    assert time.monotonic() - start < 30.0


def test_two_jobs_whose_ranks_get_each_others_ports_do_not_connect() -> None:
    """Of the same size, on one host: each knows its own token only."""

    def rank(local: LocalTransport) -> str:
        world = ThreadBootstrap(local)
        gather = world.allgather_object

        def crossed(obj: object, name: str, timeout_s: float) -> list[object]:
            every = gather(obj, name, timeout_s)
            if name == "hvd_sparse.introduction" and local.rank == 1:
                (_, port), problem = every[0]
                every[0] = (("00" * 16, port), problem)  # the token of another job
            return every

        world.allgather_object = crossed  # type: ignore[method-assign]
        with pytest.raises(TransportError) as caught:
            create_transport("gloo", world, 1.0)
        return str(caught.value)

    assert all("did not connect to rank" in says for says in run_ranks(2, rank, timeout_s=30.0))
