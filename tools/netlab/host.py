"""Keeps one host of a lab: `unshare --net --uts --mount python3 host.py NAME HOSTS_FILE`.

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

READY = "ready"
KILLING_S = 10.0


def furnish(name: str, hosts_file: str) -> None:
    """Give the host its name, its /etc/hosts, its own /sys (with its interfaces) and loopback."""
    socket.sethostname(name)
    for command in (
        ["mount", "--bind", hosts_file, "/etc/hosts"],
        ["mount", "-t", "sysfs", "sysfs", "/sys"],
        ["ip", "link", "set", "lo", "up"],
    ):
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
    """Kill them, and what they start meanwhile."""
    deadline = time.monotonic() + KILLING_S
    while (found := others_here()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    name, hosts_file = sys.argv[1:]
    try:
        furnish(name, hosts_file)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"host {name}: {error}")
    print(READY, flush=True)
    sys.stdin.read()
    kill_others()


if __name__ == "__main__":
    main()
