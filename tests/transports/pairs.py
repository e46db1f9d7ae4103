"""Two ranks that are processes and need no launcher: for faults that threads cannot have."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from hvd_sparse.errors import TransportTimeout
from hvd_sparse.transports.connect import HorovodBootstrap
from tests.launch import REPOSITORY

MEET_S = 60.0


class PairWorld(HorovodBootstrap):
    """One of two ranks, which meet over a pipe."""

    def __init__(self, rank: int, peer: Connection) -> None:
        self.rank, self.size, self.ranks = rank, 2, [0, 1]
        self.mpi_enabled, self.process_set = False, None
        self._peer = peer

    def allgather_object(self, obj: Any, name: str, timeout_s: float) -> list[Any]:
        try:
            self._peer.send(obj)
            theirs = self._peer.recv() if self._peer.poll(timeout_s) else None
        except (OSError, EOFError):  # it has ended; Horovod would wait
            theirs = None
        if theirs is None:
            raise TransportTimeout(f"rank {1 - self.rank} did not come to {name}")
        return [obj, theirs] if self.rank == 0 else [theirs, obj]

    def meet(self) -> None:
        self.allgather_object("here", "a meeting", MEET_S)


def run_pair(function: Callable[..., None], *arguments: str, limit_s: float = MEET_S) -> list[str]:
    """Calls a module's `function(world, *arguments)` as two ranks; returns what each has said.

    The processes end by `os._exit`: what gloo has lost keeps its threads.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    pipe = subprocess.PIPE
    with ExitStack() as opened:
        ranks = []
        ends = Pipe()
        for rank, end in enumerate(ends):
            module = [sys.executable, "-m", "tests.transports.pairs"]
            process = subprocess.Popen(
                [*module, name, str(rank), str(end.fileno()), *arguments],
                cwd=REPOSITORY,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                pass_fds=(end.fileno(),),
                text=True,
            )
            opened.callback(process.kill)
            ranks.append(process)
        for end in ends:
            end.close()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda p: p.communicate(timeout=limit_s)[0], ranks))


@contextmanager
def borrowed(descriptors: Iterable[int]) -> Iterator[list[socket.socket]]:
    """Socket objects of descriptors that gloo owns, without those that it has closed."""
    found = []
    for descriptor in descriptors:
        with suppress(OSError):
            found.append(socket.socket(fileno=descriptor))
    try:
        yield found
    finally:
        for one in found:
            one.detach()


def main() -> None:
    torch.set_num_threads(1)
    name, rank, descriptor, *arguments = sys.argv[1:]
    module, _, function = name.partition(":")
    world = PairWorld(int(rank), Connection(int(descriptor)))
    getattr(import_module(module), function)(world, *arguments)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
