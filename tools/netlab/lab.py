"""Makes a network of hosts: network namespaces, joined by a switch, with shaped links."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tools.netlab.host import KILLING_S, READY

BIN = Path(__file__).resolve().parent / "bin"
HOSTS_VARIABLE = "NETLAB_HOSTS"
"""Tells the `ssh` in BIN the process that keeps each host: "nl1=4711 nl2=4712"."""
HOST = Path(__file__).resolve().parent / "host.py"
MAX_HOSTS = 254
BURST_S, MIN_BURST_BYTES = 1e-3, 16_000
"""The burst after a pause: as much as the link carries in 1 ms, at least 10 packets, so that short
messages take their time, too."""
QUEUE = "20ms"
"""Packets that wait longer are dropped, as in a switch."""
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
PREFIXES |= {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
TRIAL = """\
ip link add bridge0 type bridge
ip link add veth0 type veth peer name veth1
tc qdisc add dev veth0 root tbf rate 1gbit burst 125000 latency 20ms
"""


class NetlabError(Exception):
    """The lab cannot be made or used as requested; the message is one line."""


class Traffic(NamedTuple):
    """Bytes through a host's interface since the lab is up."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Network:
    """The hosts nl1, nl2, … at 10.77.0.1, 10.77.0.2, …, each with one interface, eth0.

    Attributes:
        keepers: The process that keeps each host's namespaces.
        switch: The process that keeps the switch between them; host nlI is at its portI.
    """

    keepers: Mapping[str, int]
    switch: int

    @property
    def names(self) -> list[str]:
        """The hosts' names, in order."""
        return list(self.keepers)

    def slots(self, per_host: int) -> str:
        """Horovod's `-H`: all hosts, with so many workers on each."""
        return ",".join(f"{name}:{per_host}" for name in self.keepers)

    def on(self, host: str, command: Sequence[str] = ()) -> list[str]:
        """The command line that runs a command on a host; `ssh HOST …` works inside.

        The command runs in the directory and with the environment that its caller has.

        Raises:
            NetlabError: There is no such host.
        """
        hosts = " ".join(f"{name}={pid}" for name, pid in self.keepers.items())
        path = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = [f"--chdir={os.getcwd()}", f"{HOSTS_VARIABLE}={hosts}", f"PATH={path}"]
        return [*entering(self._keeper(host)), "env", *environment, *command]

    def traffic(self, host: str) -> Traffic:
        """Bytes that a host has sent and received, with all headers.

        Raises:
            NetlabError: There is no such host.
        """
        table = Path(f"/proc/{self._keeper(host)}/net/dev").read_text()
        counts = next(line.split(":")[1].split() for line in table.splitlines() if "eth0:" in line)
        return Traffic(sent_bytes=int(counts[8]), received_bytes=int(counts[0]))

    def cut(self, host: str) -> None:
        """Cut a host's link: what is sent is lost silently.

        Raises:
            NetlabError: There is no such host.
        """
        self._set_port(host, "down")

    def mend(self, host: str) -> None:
        """Restore a host's link.

        Raises:
            NetlabError: There is no such host.
        """
        self._set_port(host, "up")

    def _keeper(self, host: str) -> int:
        if host not in self.keepers:
            raise NetlabError(f"no host {host!r}: the hosts are {', '.join(self.keepers)}")
        return self.keepers[host]

    def _set_port(self, host: str, state: str) -> None:
        self._keeper(host)
        run_batch(self.switch, "ip", [f"link set port{host.removeprefix('nl')} {state}"])


def entering(pid: int) -> list[str]:
    """The prefix that runs a command in the namespaces of a process."""
    return ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--"]


def run_batch(pid: int, program: str, lines: Sequence[str]) -> None:
    """Run lines of `ip` or `tc` in the namespaces of a process.

    Raises:
        NetlabError: One of them was refused.
    """
    done = subprocess.run(
        [*entering(pid), program, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        failed = re.search(r"Command failed -:(\d+)", done.stderr)
        line = lines[int(failed[1]) - 1] if failed else "; ".join(lines)
        raise NetlabError(f"{program} refuses {line!r}: {done.stderr.partition(chr(10))[0]}")


def missing() -> str:
    """The reason why no lab can be made here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (
        *(("ip", "iproute2"), ("tc", "iproute2")),
        *(("unshare", "util-linux"), ("nsenter", "util-linux"), ("mount", "mount")),
    ):
        if shutil.which(program) is None:
            return f"network namespaces need {program}, of the package {package}"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", TRIAL]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"this machine refuses network namespaces: {' '.join(tried.stderr.split())}"
    return ""


def bytes_per_s(rate: str) -> float:
    """A rate as `tc` writes it (100mbit, 1.5gbit, 12mbps for bytes) in bytes per second.

    Raises:
        NetlabError: It is not a rate above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|[kmgt]i?)(|bit|bps)", rate.lower())
    if match is None or float(match[1]) == 0:
        raise NetlabError(f"a rate must be above 0, and written as 100mbit or 1gbit, got {rate!r}")
    return float(match[1]) * PREFIXES[match[2]] / (1 if match[3] == "bps" else 8)


class Netlab:
    """Hosts on one machine, each with its own link; removed when the `with` block ends.

    Each host has a network, a host name and an /etc/hosts of its own; it shares processes and files
    with the machine. Labs do not see each other, so several may be up at a time. When the process
    that made a lab dies, the lab goes, with all that runs on its hosts.

    Args:
        hosts: How many, 1 to 254.
        rate: What each host may send, and receive, as `tc` writes it: 1gbit. None: not shaped.

    Raises:
        NetlabError: An argument is out of range, or `missing()` says why there can be no lab.
    """

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise NetlabError(f"hosts must be in [1, {MAX_HOSTS}], got {hosts}")
        self._names = [f"nl{i + 1}" for i in range(hosts)]
        self._shaping = None
        if rate is not None:
            burst = max(MIN_BURST_BYTES, round(bytes_per_s(rate) * BURST_S))
            self._shaping = f"root tbf rate {rate} burst {burst} latency {QUEUE}"
        if reason := missing():
            raise NetlabError(reason)
        self._keepers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        try:
            *hosts, switch = self._start_keepers()
            network = Network(dict(zip(self._names, hosts, strict=True)), switch)
            self._connect(network)
        except BaseException:
            self._down()
            raise
        return network

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._down()

    def _start_keepers(self) -> list[int]:
        """A process for each host, and one for the switch."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"10.77.0.{i} {name}" for i, name in enumerate(self._names, 1)]
        for name in (*self._names, "switch"):
            # Slave: what is mounted on the machine later is seen on the host, but not vice versa.
            command = ["unshare", "--net", "--uts", "--mount", "--propagation=slave"]
            self._keepers.append(
                subprocess.Popen(
                    [*command, sys.executable, "-I", HOST, name, "\n".join([*lines, ""])],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        for keeper in self._keepers:
            assert keeper.stdout is not None
            assert keeper.stderr is not None
            if keeper.stdout.readline().strip() != READY:
                raise NetlabError(" ".join(keeper.stderr.read().split()))
        return [keeper.pid for keeper in self._keepers]

    def _connect(self, network: Network) -> None:
        """Link each host to the switch, and shape both ends."""
        links = ["link add switch0 type bridge", "link set switch0 up"]
        shaping = []
        for i, pid in enumerate(network.keepers.values(), 1):
            port = f"port{i}"
            links += [
                f"link add {port} type veth peer name eth0 netns {pid}",
                f"link set {port} master switch0",
                f"link set {port} up",
            ]
            shaping.append(f"qdisc add dev {port} {self._shaping}")
        run_batch(network.switch, "ip", links)
        for i, pid in enumerate(network.keepers.values(), 1):
            run_batch(pid, "ip", [f"addr add 10.77.0.{i}/24 dev eth0", "link set eth0 up"])
        if self._shaping is not None:
            run_batch(network.switch, "tc", shaping)
            for pid in network.keepers.values():
                run_batch(pid, "tc", [f"qdisc add dev eth0 {self._shaping}"])

    def _down(self) -> None:
        for keeper in self._keepers:
            assert keeper.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                keeper.stdin.close()
        for keeper in self._keepers:
            try:
                keeper.wait(2 * KILLING_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
            for stream in (keeper.stdout, keeper.stderr):
                assert stream is not None
                stream.close()
            keeper.wait()
        self._keepers.clear()
