"""What listens while the ranks meet and afterwards, and what a stranger can do with it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from hvd_sparse.errors import PlanError, TransportError
from hvd_sparse.transports import LocalTransport, Transport, run_ranks
from hvd_sparse.transports.connect import PROTOCOL, check_releases, create_transport
from hvd_sparse.transports.meeting import MeetingStore, join_store, serve_store
from tests.transports.test_choose import ThreadBootstrap, over_gloo

pytestmark = pytest.mark.timeout(60)


def listening() -> set[tuple[str, int]]:
    """The addresses on which this process listens."""
    connections = psutil.Process(os.getpid()).net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_gloo_listens_on_loopback_only_and_leaves_no_store() -> None:
    before = listening()

    def rank(t: Transport) -> set[tuple[str, int]]:
        t.allreduce_sum(torch.ones(1), channel="all are connected")
        now = listening() - before
        t.allreduce_sum(torch.ones(1), channel="all have looked")
        return now

    for found in over_gloo(3, rank):
        assert {ip for ip, _ in found} == {"127.0.0.1"}
        # Gloo's own port of each of the three ranks, which are threads here; at most one more each.
        assert 3 <= len(found) <= 6
    assert not listening() - before  # what was there before may have gone meanwhile


def test_noise_on_an_open_port_changes_nothing() -> None:
    before = listening()

    def rank(t: Transport) -> None:
        t.allreduce_sum(torch.ones(1), channel="c")
        if t.rank == 0:
            for address in sorted(listening() - before):
                with socket.create_connection(address, timeout=5.0) as stranger:
                    stranger.sendall(os.urandom(100_000))
        for count in (1, 100_000, 7):
            total = t.allreduce_sum(torch.ones(count), channel="c")
            assert torch.equal(total, torch.full((count,), 3.0))

    over_gloo(3, rank)


def test_a_store_listens_on_its_address_only() -> None:
    before = listening()
    store, port = serve_store("127.0.0.1", 5.0)
    assert listening() - before == {("127.0.0.1", port)}
    peer = join_store("127.0.0.1", port, 5.0)
    peer.set("key", "value")
    assert store.get("key") == b"value"
    del peer, store
    assert not listening() - before  # what was there before may have gone meanwhile


def test_an_address_of_another_host_is_refused_by_name() -> None:
    elsewhere = str(ipaddress.IPv4Address("192.0.2.1"))
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        serve_store(elsewhere, 5.0)


def test_what_nobody_wrote_is_named() -> None:
    store = MeetingStore(lambda entries: [entries])
    store.set("mine", b"1")
    assert store.get("mine") == b"1"
    with pytest.raises(TransportError, match="no rank has written"):
        store.wait(["theirs"])


def test_entries_reach_all_ranks() -> None:
    def rank(local: LocalTransport) -> list[bytes]:
        world = ThreadBootstrap(local)
        store = MeetingStore(lambda entries: world.allgather_object(entries, "entries", 5.0))
        store.set(str(local.rank), f"of {local.rank}")
        return [store.get(str(peer)) for peer in range(3)]

    assert run_ranks(3, rank) == [[b"of 0", b"of 1", b"of 2"]] * 3


def test_ranks_of_other_releases_are_named() -> None:
    check_releases([(PROTOCOL, "1.0")] * 4)
    with pytest.raises(
        PlanError, match=r"1\.0 \(protocol 1\) on ranks 0, 2; 1\.1 \(protocol 2\) on ranks 1"
    ):
        check_releases([(1, "1.0"), (2, "1.1"), (1, "1.0")])


def of_another_release(local: LocalTransport, make: Callable[[ThreadBootstrap], Any]) -> str:
    """What a rank says where rank 1 runs another release."""
    world = ThreadBootstrap(local)
    gather = world.allgather_object

    def changed(obj: Any, name: str, timeout_s: float) -> list[Any]:
        if local.rank == 1 and name == "hvd_sparse.hello":
            protocol, _, _ = obj
            obj = (protocol, "9.9", b"what only 9.9 can read")
        return gather(obj, name, timeout_s)

    world.allgather_object = changed  # type: ignore[method-assign]
    with pytest.raises(PlanError) as caught:
        make(world)
    return str(caught.value)


def test_another_release_is_refused_before_anything_of_it_is_read() -> None:
    says = run_ranks(
        3, lambda local: of_another_release(local, lambda w: create_transport("gloo", w, 5.0))
    )
    assert len(set(says)) == 1
    assert "9.9 (protocol 1) on ranks 1" in says[0]
