"""What listens while the ranks meet and afterwards, and the choice of addresses."""

from __future__ import annotations

import ipaddress
import os

import psutil
import pytest
import torch

from hvd_sparse.errors import ConfigError, TransportError
from hvd_sparse.transports import LocalTransport, Transport, run_ranks
from hvd_sparse.transports.meeting import (
    HostReport,
    Interface,
    MeetingStore,
    choose_addresses,
    describe_host,
    join_store,
    serve_store,
)
from tests.transports.test_connect import ThreadBootstrap, over_gloo

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
        assert len(found) == 3  # gloo's own port of each of the three ranks, which are threads here
    assert not listening() - before  # what was there before may have gone meanwhile


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


def test_an_unreachable_store_is_named() -> None:
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:9"):
        join_store("127.0.0.1", 9, 0.5)


# -- the choice of interface and address, from made-up reports

LOOPBACK = Interface("lo", "127.0.0.1", "255.0.0.0")
DOCKER = Interface("docker0", "172.17.0.1", "255.255.0.0")


def ethernet(host: int, name: str = "eth0", subnet: str = "10.0.0") -> Interface:
    return Interface(name, f"{subnet}.{host}", "255.255.255.0")


def report(host: int, *interfaces: Interface, own: str | None = None, horovod: str | None = None):
    return HostReport(f"host{host}", (LOOPBACK, *interfaces), own, horovod)


def test_one_host_uses_loopback() -> None:
    reports = [report(1, ethernet(1), horovod="eth0")] * 3
    assert choose_addresses(reports) == ["127.0.0.1"] * 3


def test_one_host_needs_no_network() -> None:
    assert choose_addresses([report(1)]) == ["127.0.0.1"]
    assert choose_addresses([HostReport("a", ())]) == ["127.0.0.1"]


def test_several_hosts_use_the_subnet_they_share() -> None:
    reports = [
        report(1, ethernet(1, "wlan0", "192.168.1"), ethernet(1)),
        report(2, ethernet(2, "ens5")),
        report(2, ethernet(2, "ens5")),
    ]
    assert choose_addresses(reports) == [
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.2",
    ]


def test_a_container_bridge_is_no_shared_subnet() -> None:
    reports = [report(1, DOCKER, ethernet(1)), report(2, DOCKER, ethernet(2))]
    assert choose_addresses(reports) == ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(TransportError, match=r"docker0 172\.17\.0\.1/16"):
        choose_addresses([report(1, DOCKER), report(2, DOCKER)])


def test_link_local_and_single_addresses_are_passed_over() -> None:
    link_local = [Interface("usb0", f"169.254.0.{host}", "255.255.0.0") for host in (1, 2)]
    single = Interface("dummy0", "10.9.9.9", "255.255.255.255")
    with pytest.raises(TransportError, match="share no IPv4 subnet"):
        choose_addresses([report(1, link_local[0], single), report(2, link_local[1], single)])


def test_the_error_names_what_was_seen() -> None:
    reports = [report(1, ethernet(1)), report(2, ethernet(2, "eth1", "10.0.9")), report(3)]
    with pytest.raises(TransportError) as caught:
        choose_addresses(reports)
    message = str(caught.value)
    assert "rank 0 on host1: lo 127.0.0.1/8, eth0 10.0.0.1/24" in message
    assert "rank 1 on host2: lo 127.0.0.1/8, eth1 10.0.9.2/24" in message
    assert "HVD_SPARSE_IFACE" in message


def two_networks(host: int, **choice: str) -> HostReport:
    return report(host, ethernet(host), ethernet(host, "ib0", "10.1.0"), **choice)


def test_the_users_interface_comes_first() -> None:
    reports = [two_networks(h, own="ib0", horovod="eth0") for h in (1, 2)]
    assert choose_addresses(reports)[1] == "10.1.0.2"


def test_horovods_interface_comes_next() -> None:
    reports = [two_networks(h, horovod="ib0") for h in (1, 2)]
    assert choose_addresses(reports)[0] == "10.1.0.1"


@pytest.mark.parametrize("useless", ["lo", "eth7"])
def test_horovods_interface_is_ignored_where_useless(useless: str) -> None:
    reports = [two_networks(1, horovod=useless), two_networks(2, horovod="eth0")]
    assert choose_addresses(reports) == ["10.0.0.1", "10.0.0.2"]  # of eth0


def test_the_named_interfaces_may_be_on_routed_subnets() -> None:
    reports = [report(h, ethernet(h, subnet=f"10.0.{h}"), own="eth0") for h in (1, 2)]
    assert choose_addresses(reports) == ["10.0.1.1", "10.0.2.2"]


@pytest.mark.parametrize("useless", ["lo", "eth7", None])
def test_a_useless_choice_of_the_user_is_an_error(useless: str | None) -> None:
    reports = [two_networks(1, own="eth0"), two_networks(2, own=useless)]
    with pytest.raises(ConfigError, match=r"HVD_SPARSE_IFACE .* on ranks \[1\]: rank 1 on host2"):
        choose_addresses(reports)


def test_this_host_can_be_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_SPARSE_IFACE", "")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth0")
    described = describe_host()
    assert described.own_choice is None
    assert described.horovod_choice == "eth0"
    assert any(interface.is_loopback for interface in described.interfaces)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE")
    assert described.host == describe_host().host
    assert choose_addresses([described, describe_host()])[1] == "127.0.0.1"
