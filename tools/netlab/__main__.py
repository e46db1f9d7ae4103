"""The network lab from a shell, as root; one lab at a time.

python -m tools.netlab up 4 1gbit       hosts nl1 to nl4, with links of 1 Gb/s (no rate: not
                                        shaped)
python -m tools.netlab exec nl1 CMD…    runs CMD on host nl1; `ssh nl2 …` works inside, and so do
                                        horovodrun and mpirun
python -m tools.netlab bytes            what each host has sent and received
python -m tools.netlab cut nl2          pulls the cable of host nl2
python -m tools.netlab mend nl2         puts it back
python -m tools.netlab down             removes the hosts, and all that runs on them
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tools.netlab import Netlab, NetlabError, Network

REPOSITORY = Path(__file__).resolve().parents[2]
ADDRESS = "\0hvd_sparse.netlab"
"""The socket where the owner tells of its lab; also the lock, which vanishes with the owner."""
UP = "up"
DOWN_S = 60.0


def end_once(number: int, frame: object) -> NoReturn:
    """Exit through the `with` blocks, ignoring further signals."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit()


def keep(hosts: int, rate: str | None) -> None:
    """Hold a lab until SIGTERM; runs in the background."""
    signal.signal(signal.SIGTERM, end_once)
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(ADDRESS)
        except OSError as error:
            raise NetlabError("a lab is up already; `down` removes it") from error
        with Netlab(hosts, rate) as network:
            owner = {"owner": os.getpid(), "keepers": network.keepers, "switch": network.switch}
            server.listen()
            print(UP, flush=True)
            while True:
                client, _ = server.accept()
                with client, contextlib.suppress(OSError):
                    client.sendall(json.dumps(owner).encode())


def up(hosts: int, rate: str | None) -> None:
    """Start `keep`, and wait until the lab is up."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tools.netlab", "keep", str(hosts), *([rate] if rate else [])],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    said = keeper.stdout.readline().strip()
    if said != UP:
        raise NetlabError(said.removeprefix("error: ") or "the lab's owner died")


def find() -> tuple[Network, int] | None:
    """The lab that is up and its owner's process, or None."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(ADDRESS)
        except ConnectionRefusedError:
            return None
        with client.makefile() as answer:
            told = json.load(answer)
    return Network(told["keepers"], told["switch"]), told["owner"]


def down() -> None:
    """End the owner, if any, and wait until it has exited."""
    found = find()
    if found is None:
        return
    owner = os.pidfd_open(found[1])
    signal.pidfd_send_signal(owner, signal.SIGTERM)
    if not select.select([owner], [], [], DOWN_S)[0]:
        raise NetlabError(f"the lab's owner, process {found[1]}, does not end in {DOWN_S:g} s")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse_arguments() -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.netlab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("up", "keep"):
        command = commands.add_parser(name)
        command.add_argument("hosts", type=int, metavar="P")
        command.add_argument("rate", nargs="?", metavar="RATE")
    command = commands.add_parser("exec")
    command.add_argument("host", metavar="HOST")
    command.add_argument("line", nargs=argparse.REMAINDER, metavar="CMD")
    for name in ("cut", "mend"):
        commands.add_parser(name).add_argument("host", metavar="HOST")
    for name in ("bytes", "down"):
        commands.add_parser(name)
    return parser.parse_args()


def act(args: argparse.Namespace) -> None:
    """Run the requested command."""
    if args.command in ("up", "keep"):
        (up if args.command == "up" else keep)(args.hosts, args.rate)
        return
    if args.command == "down":
        down()
        return
    found = find()
    if found is None:
        raise NetlabError("no lab is up; `up P [RATE]` makes one")
    network, _ = found
    if args.command == "bytes":
        for name in network.names:
            traffic = network.traffic(name)
            print(f"{name} sent {traffic.sent_bytes} received {traffic.received_bytes}")
        return
    host = f"nl{args.host}" if args.host.isdigit() else args.host
    if args.command == "exec":
        if not args.line:
            raise NetlabError(f"no command for host {host}")
        line = network.on(host, args.line)
        os.execvp(line[0], line)
    elif args.command == "cut":
        network.cut(host)
    else:
        network.mend(host)


def main() -> int:
    try:
        act(parse_arguments())
    except (NetlabError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
