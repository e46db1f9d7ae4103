"""Keeps one host of a lab: `unshare --net --uts --mount python3 host.py NAME HOSTS`, where
HOSTS is the text of its /etc/hosts.

The namespaces live as long as a process is in them. This one stays until its standard input ends,
which happens in any case when the process that made the lab dies. Then it kills whatever else is
left on the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

READY = "ready"
KILLING_S = 10.0


def furnish(name: str, hosts: str) -> None:
    """Set up the host's name, its /etc/hosts, its own /sys (with its interfaces) and loopback."""
    socket.sethostname(name)
    # The file lies in memory, beneath what is mounted on /sys next: no trace of it on the machine.
    run("mount", "-t", "tmpfs", "tmpfs", "/sys")
    Path("/sys/hosts").write_text(hosts)
    run("mount", "--bind", "/sys/hosts", "/etc/hosts")
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    run("ip", "link", "set", "lo", "up")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def others_here() -> list[int]:
    """The other processes in this network namespace."""
    here = os.stat("/proc/self/ns/net").st_ino
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            # A process may end while this looks.
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino == here:
                    found.append(int(entry))
    return found


def kill_others() -> None:
    """Kill them, and what they start in the meantime."""
    deadline = time.monotonic() + KILLING_S
    while (found := others_here()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    name, hosts = sys.argv[1:]
    try:
        furnish(name, hosts)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"host {name}: {error}")
    print(READY, flush=True)
    sys.stdin.read()
    kill_others()


if __name__ == "__main__":
    main()
