"""How the ranks of several hosts find each other's addresses, and what listens meanwhile.

Gloo needs no server: `MeetingStore` gives all ranks' addresses to all, by one allgather over
Horovod. What listens is gloo itself, one TCP port per rank and group, bound to the rank's address.

NCCL asks a store as long as the group lives. So it gets a `TCPStore`, which rank 0 binds to its
address, until `close`. A stranger can write to it, but has to guess the prefix of its keys, 16
random bytes that went over Horovod.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from hvd_sparse.errors import ConfigError, TransportError

dist: Any = torch.distributed  # its type hints leave out what is used here

OWN_VARIABLE = "HVD_SPARSE_IFACE"
HOROVOD_VARIABLE = "HOROVOD_GLOO_IFACE"
LOOPBACK_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Interface:
    """An IPv4 address of a network interface that is up: `eth0`, `10.0.0.7`, `255.255.255.0`."""

    name: str
    address: str
    netmask: str

    @property
    def network(self) -> IPv4Network:
        return IPv4Interface(f"{self.address}/{self.netmask}").network

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of the same host can reach it."""
        return IPv4Interface(self.address).is_loopback

    def __str__(self) -> str:
        return f"{self.name} {self.address}/{self.network.prefixlen}"


@dataclass(frozen=True)
class HostReport:
    """What one rank knows of its host: the interfaces that are up, and which the user named.

    Two ranks have the same `host` exactly if they share a loopback interface.
    """

    host: str
    interfaces: tuple[Interface, ...]
    own_choice: str | None = None
    horovod_choice: str | None = None


def describe_host() -> HostReport:
    named = (os.environ.get(name) or None for name in (OWN_VARIABLE, HOROVOD_VARIABLE))
    return HostReport(_host_id(), _interfaces(), *named)


def choose_addresses(reports: Sequence[HostReport]) -> list[str]:
    """The IPv4 address where each rank listens, from the ranks' reports in order.

    On one host, that is the loopback interface's. On several hosts it is the address of, in this
    order: the interface named by HVD_SPARSE_IFACE; the one named by HOROVOD_GLOO_IFACE, if every
    host has it; an interface on a subnet that all hosts share.

    Raises:
        ConfigError: HVD_SPARSE_IFACE names an interface that some host cannot use.
        TransportError: The hosts share no subnet.
    """
    if len({report.host for report in reports}) == 1:
        return [LOOPBACK_ADDRESS] * len(reports)
    if any(report.own_choice for report in reports):
        named = [_named(report, report.own_choice) for report in reports]
        missing = [rank for rank, interface in enumerate(named) if interface is None]
        if missing:
            raise ConfigError(
                f"{OWN_VARIABLE} must name, on every rank, an interface that is up, has an IPv4 "
                f"address and is not loopback; it does not on ranks {missing}: "
                + _seen(reports, missing)
            )
        return _addresses(named)
    named = [_named(report, report.horovod_choice) for report in reports]
    if None not in named:
        return _addresses(named)
    return _addresses(_on_shared_subnet(reports))


def _named(report: HostReport, name: str | None) -> Interface | None:
    usable = (i for i in report.interfaces if i.name == name and not i.is_loopback)
    return next(usable, None)


def _on_shared_subnet(reports: Sequence[HostReport]) -> list[Interface | None]:
    """An interface per rank, all on the first such subnet in the order of rank 0's interfaces."""
    for candidate in reports[0].interfaces:
        network = candidate.network
        if candidate.is_loopback or network.is_link_local or network.prefixlen == 32:
            continue
        chosen = [
            next((i for i in report.interfaces if i.network == network), None) for report in reports
        ]
        # Where two hosts have the same address, as on container engines' bridges, the subnet is not
        # one network but a private one on each host.
        hosts_of: dict[str, set[str]] = {}
        for report, interface in zip(reports, chosen, strict=True):
            if interface is not None:
                hosts_of.setdefault(interface.address, set()).add(report.host)
        if None not in chosen and all(len(hosts) == 1 for hosts in hosts_of.values()):
            return chosen
    raise TransportError(
        "the hosts share no IPv4 subnet besides loopback; name an interface by which they reach "
        f"each other in {OWN_VARIABLE}. Seen: " + _seen(reports, range(len(reports)))
    )


def _addresses(interfaces: Sequence[Interface | None]) -> list[str]:
    return [interface.address for interface in interfaces if interface is not None]


def _seen(reports: Sequence[HostReport], ranks: Sequence[int]) -> str:
    """The interfaces of these ranks' hosts, in words, each host once."""
    lines: dict[str, str] = {}
    for rank in ranks:
        report = reports[rank]
        interfaces = ", ".join(map(str, report.interfaces)) or "no interface"
        choice = f" ({OWN_VARIABLE}={report.own_choice})" if report.own_choice else ""
        lines.setdefault(report.host, f"rank {rank} on {report.host}{choice}: {interfaces}")
    return "; ".join(lines.values())


def _host_id() -> str:
    """Host name, boot and network namespace: containers on one machine may share the first two."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        namespace = os.stat("/proc/self/ns/net").st_ino
    except FileNotFoundError:  # not Linux
        return name
    return f"{name}/{boot}/{namespace}"


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        if name in states and not states[name].isup:
            continue
        for address in addresses:
            if address.family == socket.AF_INET and address.netmask:
                found.append(Interface(name, address.address, address.netmask))
    return tuple(found)


BACKLOG = 1024
"""Connections that may wait to be accepted: more than one group's ranks in practice."""

ROUNDS = 4
"""Allgathers after which a key counts as unwritten; gloo needs one."""


class MeetingStore(dist.Store):  # type: ignore[misc]
    """A store that gives its entries to all ranks by allgather, once one is asked for.

    Every rank writes its entries, and then asks for the others'. The first question for a missing
    key starts an allgather of everything written since the last one. So all ranks have to take
    turns in the same way, as they do in gloo's full mesh. `own` is what this rank has written, and
    `entries` what has arrived, of all ranks. `allgather` gives every rank's object to every rank.
    """

    def __init__(self, allgather: Callable[[dict[str, bytes]], list[dict[str, bytes]]]) -> None:
        super().__init__()
        self._allgather = allgather
        self.own: dict[str, bytes] = {}
        self.entries: dict[str, bytes] = {}
        self._new: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.own[key] = self._new[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """An entry of any rank; collective where it has not arrived yet."""
        self.wait([key])
        return self.entries[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Fetches the entries; the allgather has its own timeout."""
        for _ in range(ROUNDS):
            if self.check(keys):
                return
            new, self._new = self._new, {}
            for entries in self._allgather(new):
                self.entries.update(entries)
        missing = [key for key in keys if key not in self.entries]
        if missing:
            raise TransportError(f"no rank has written {missing} while the ranks met")


def listen(address: str) -> socket.socket:
    """A TCP socket that listens on a free port of one address."""
    try:
        return socket.create_server((address, 0), backlog=BACKLOG)
    except OSError as error:
        raise TransportError(f"cannot listen on {address}: {error}") from error


def _store(host: str, port: int, timeout_s: float, **options: Any) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **options)


def serve_store(address: str, timeout_s: float) -> tuple[Any, int]:
    """Starts a `TCPStore` on rank 0 that listens on one IPv4 address; returns it, and its port."""
    listener = listen(address)
    port: int = listener.getsockname()[1]
    # The store owns the descriptor and closes it from here on.
    return _store(
        address, port, timeout_s, is_master=True, master_listen_fd=listener.detach()
    ), port


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """Connects to rank 0's store."""
    try:
        return _store(host, port, timeout_s, is_master=False)
    except RuntimeError as error:
        raise TransportError(f"cannot reach rank 0's store at {host}:{port}: {error}") from error
