"""Several hosts: network namespaces on one bridge, each with a network of its own.

HVD_SPARSE_NETLAB names a script with the commands `up COUNT`, `exec HOST COMMAND…` and `down`. Its
hosts are called nl1, nl2, …; they reach each other over eth0 in 10.77.0.0/24, and let ssh in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.launch import Controller, horovodrun
from tests.workers.transport_worker import chosen

NETLAB = os.environ.get("HVD_SPARSE_NETLAB", "")
COUNT = 4
HOSTS = ",".join(f"nl{host}:1" for host in range(1, COUNT + 1))


def missing() -> str:
    """Why these tests cannot run here, or an empty string."""
    if not NETLAB:
        return "HVD_SPARSE_NETLAB does not name a script that makes hosts"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    return ""


pytestmark = [
    pytest.mark.netlab,
    pytest.mark.launches,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def netlab() -> Iterator[list[str]]:
    """The start of a command on host 1."""
    subprocess.run([NETLAB, "up", str(COUNT)], check=True, timeout=60)
    try:
        yield [NETLAB, "exec", "1"]
    finally:
        subprocess.run([NETLAB, "down"], check=True, timeout=60)


def chosen_addresses(
    netlab: list[str],
    name: str,
    controller: Controller,
    *,
    hosts: str = HOSTS,
    np: int = COUNT,
    env: dict[str, str] | None = None,
) -> tuple[list[str], list[str]]:
    """The transport and the address that each rank chose, once some scenarios have passed."""
    done = horovodrun(
        np,
        chosen,
        name,
        controller=controller,
        hosts=hosts,
        env=env,
        prefix=netlab,
        timeout=240.0,
    )
    assert len(re.findall("all scenarios passed", done.stdout)) == np, done.stdout
    found = re.findall(r"rank (\d+): chose (\w+) at (\S+)", done.stdout)
    found.sort(key=lambda row: int(row[0]))
    return [row[1] for row in found], [row[2] for row in found]


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_gloo_takes_the_shared_network(netlab: list[str], controller: Controller) -> None:
    names, addresses = chosen_addresses(netlab, "gloo", controller)
    assert names == ["gloo"] * COUNT
    assert addresses == [f"10.77.0.{host}" for host in range(1, COUNT + 1)]


def test_mpi_connects_the_hosts(netlab: list[str]) -> None:
    names, _ = chosen_addresses(netlab, "auto", "mpi")
    assert names == ["mpi"] * COUNT


def test_two_ranks_on_each_host(netlab: list[str]) -> None:
    # Not under MPI: the namespaces share one host name, by which Open MPI names shared memory.
    _, addresses = chosen_addresses(netlab, "gloo", "gloo", hosts="nl1:2,nl2:2")
    assert addresses == ["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.2"]


def test_the_users_interface_is_taken(netlab: list[str]) -> None:
    _, addresses = chosen_addresses(netlab, "gloo", "gloo", env={"HVD_SPARSE_IFACE": "eth0"})
    assert addresses == [f"10.77.0.{host}" for host in range(1, COUNT + 1)]


def test_one_of_the_hosts_alone_uses_loopback(netlab: list[str]) -> None:
    _, addresses = chosen_addresses(netlab, "gloo", "gloo", hosts="nl1:2", np=2)
    assert addresses == ["127.0.0.1", "127.0.0.1"]
