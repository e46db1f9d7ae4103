"""What can be done with a network of hosts that is up."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BIN = Path(__file__).resolve().parent / "bin"
HOSTS_VARIABLE = "NETLAB_HOSTS"
"""Tells the `ssh` in BIN the process that keeps each host: "nl1=4711 nl2=4712"."""


class NetlabError(Exception):
    """The lab cannot do what it is asked; the message is one line."""


class Traffic(NamedTuple):
    """What has passed a host's interface since the lab is up."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class Network:
    """The hosts nl1, nl2, … at 10.77.0.1, 10.77.0.2, …, each with one interface, eth0.

    Attributes:
        keepers: For each host the process that keeps its namespaces.
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
        """Pull a host's cable: what is sent is lost, and nobody is told.

        Raises:
            NetlabError: There is no such host.
        """
        self._set_port(host, "down")

    def mend(self, host: str) -> None:
        """Put it back.

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
    """The start of a command in the namespaces of a process."""
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
