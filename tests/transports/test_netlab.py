"""Transports between several hosts, each with a network of its own (tools/netlab)."""

from __future__ import annotations

import re

import pytest

from tests.launch import Controller, horovodrun
from tests.transports.test_processes import chosen
from tools.netlab import Network

COUNT = 4
ADDRESSES = [f"10.77.0.{host}" for host in range(1, COUNT + 1)]

pytestmark = [pytest.mark.netlab, pytest.mark.launches, pytest.mark.timeout(300)]


def chosen_addresses(
    netlab: Network,
    name: str,
    controller: Controller,
    *,
    hosts: str | None = None,
    np: int = COUNT,
) -> tuple[list[str], list[str]]:
    """The transport and the address that each rank chose, once some scenarios have passed."""
    done = horovodrun(
        np,
        chosen,
        name,
        controller=controller,
        hosts=hosts or ",".join(netlab.slots(1).split(",")[:np]),
        prefix=netlab.on("nl1"),
        timeout=240.0,
    )
    assert len(re.findall("all scenarios passed", done.stdout)) == np, done.stdout
    found = re.findall(r"rank (\d+): chose (\w+) at (\S+)", done.stdout)
    found.sort(key=lambda row: int(row[0]))
    return [row[1] for row in found], [row[2] for row in found]


@pytest.mark.parametrize(("controller", "np"), [("gloo", COUNT), ("mpi", 2)])
def test_gloo_takes_the_shared_network(netlab: Network, controller: Controller, np: int) -> None:
    names, addresses = chosen_addresses(netlab, "gloo", controller, np=np)
    assert names == ["gloo"] * np
    assert addresses == ADDRESSES[:np]


def test_mpi_connects_the_hosts(netlab: Network) -> None:
    names, _ = chosen_addresses(netlab, "auto", "mpi", hosts="nl1:2,nl2:2")
    assert names == ["mpi"] * COUNT


def test_two_ranks_on_each_host(netlab: Network) -> None:
    _, addresses = chosen_addresses(netlab, "gloo", "gloo", hosts="nl1:2,nl2:2")
    assert addresses == ["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.2"]


def test_one_of_the_hosts_alone_uses_loopback(netlab: Network) -> None:
    _, addresses = chosen_addresses(netlab, "gloo", "gloo", hosts="nl1:2", np=2)
    assert addresses == ["127.0.0.1", "127.0.0.1"]
