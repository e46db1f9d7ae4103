"""Ranks that many tests share: launched once, they run one scenario after the other.

A launch takes each rank some seconds, most scenarios take a fraction of one. A test asks for a
world, and gives its ranks a function with arguments that can be pickled:

    @with_ranks(World(2), World(3, "mpi"))
    def test_something(ranks: Ranks) -> None:
        ranks.run(something, "gloo")

A function names the tensors that it gives to Horovod: the names that Horovod makes up count the
calls of each rank, which differ between ranks once one of them was in no process set.

Tests that take the same world run one after the other, whichever files they stand in, and its ranks
end after the last of them. Where a scenario fails or hangs, they are killed, and the next one gets
new ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.launch import Controller, Launch, launch_command, launch_environment

if TYPE_CHECKING:
    import pytest

START_S = 120.0
"""For all ranks to be there, on a busy machine too."""

GRACE_S = 15.0
"""For the other ranks to end a scenario, or to say why not, when one has failed in it."""

END_S = 60.0
"""For all ranks to leave in order."""


DYNAMIC_SETS = (("HOROVOD_DYNAMIC_PROCESS_SETS", "1"),)


@dataclass(frozen=True)
class World:
    """What ranks are launched with."""

    size: int
    controller: Controller = "gloo"
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.controller, str(self.size), *(name for name, _ in self.env)])


class Scenario(NamedTuple):
    """What each rank is to do, and the variables that are set meanwhile."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    env: Mapping[str, str]


class Done(NamedTuple):
    """What one rank did: `error` is a traceback, or empty."""

    output: str
    result: Any
    error: str


class ScenarioError(AssertionError):
    """A scenario failed on some ranks, or did not end on them; says what each of them said."""


class Ranks:
    """A world's ranks; they are launched when first needed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._launch: Launch | None = None
        self._connections: list[Connection] = []
        self._pids: list[int] = []

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        timeout: float = 100.0,
    ) -> list[Done]:
        """Runs a function on all ranks and waits for it.

        Args:
            function: of a test's module, which the ranks import.
            *arguments: its arguments.
            env: variables that are set while it runs.
            timeout: seconds until the ranks are killed.

        Returns:
            What each rank did, in order.

        Raises:
            ScenarioError: The function failed on a rank, or did not end in time.
            LaunchError: The ranks did not start.
        """
        launch = self._launch or self._start()
        done: dict[int, Done] = {}
        ending = f"{timeout:g} s"
        try:
            for connection in self._connections:
                connection.send(Scenario(function, arguments, env or {}))
            self._collect(done, timeout)
        except (EOFError, OSError):
            ending = "the death of a rank"
        finally:
            if not self._all_well(done):
                self._ask_where(rank for rank in range(self.world.size) if rank not in done)
                self.kill()
        if not self._all_well(done):
            told = [self._told(rank, done.get(rank), ending) for rank in range(self.world.size)]
            raise ScenarioError("\n".join([function.__name__, *told, launch.error("").args[0]]))
        return [done[rank] for rank in range(self.world.size)]

    def _collect(self, done: dict[int, Done], timeout: float) -> None:
        """Takes the ranks' answers until all are there, or time is up."""
        deadline = time.monotonic() + timeout
        while len(done) < self.world.size:
            missing = [c for rank, c in enumerate(self._connections) if rank not in done]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    done[rank] = connection.recv()
                    if done[rank].error:
                        deadline = min(deadline, time.monotonic() + GRACE_S)

    def _all_well(self, done: Mapping[int, Done]) -> bool:
        return len(done) == self.world.size and not any(d.error for d in done.values())

    def _ask_where(self, ranks: Iterable[int]) -> None:
        """Lets ranks write to the launch's standard error where their threads are."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(1.0)

    def _told(self, rank: int, done: Done | None, ending: str) -> str:
        if done is None:
            return f"--- rank {rank} had not ended after {ending}"
        return f"--- rank {rank}{' failed' if done.error else ''}\n{done.output}{done.error}"

    def _start(self) -> Launch:
        folder = tempfile.mkdtemp(prefix="ranks-")
        address = os.path.join(folder, "socket")
        command = launch_command(
            self.world.size, "serve.py", address, controller=self.world.controller
        )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.world.size)
            self._launch = launch = Launch(command, launch_environment(dict(self.world.env)))
            try:
                self._accept(listener, launch)
            except BaseException:
                self.kill()
                raise
            finally:
                shutil.rmtree(folder)
        return launch

    def _accept(self, listener: socket.socket, launch: Launch) -> None:
        """Takes the ranks' connections and process ids, in order."""
        of_rank: dict[int, tuple[Connection, int]] = {}
        deadline = time.monotonic() + START_S
        listener.settimeout(0.2)
        while len(of_rank) < self.world.size:
            if launch.process.poll() is not None or time.monotonic() > deadline:
                raise launch.error(f"{len(of_rank)} of {self.world.size} ranks came")
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            rank, pid = connection.recv()
            of_rank[rank] = (connection, pid)
        self._connections, self._pids = map(
            list, zip(*(of_rank[rank] for rank in range(self.world.size)), strict=True)
        )

    def close(self) -> None:
        """Lets the ranks leave.

        Raises:
            LaunchError: They did not leave in order.
        """
        if self._launch is None:
            return
        launch = self._launch
        try:
            for connection in self._connections:
                connection.send(None)
            status = launch.process.wait(END_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise launch.error(f"the ranks did not leave: {error!r}") from None
        finally:
            self.kill()
        if status != 0:
            raise launch.error(f"ended {status}")

    def kill(self) -> None:
        """Ends the ranks at once; the next scenario gets new ones."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._launch is not None:
            self._launch.kill()
            self._launch = None


def with_ranks(*worlds: World) -> pytest.MarkDecorator:
    """Runs a test, which has an argument `ranks`, in each of these worlds."""
    import pytest  # here: it takes a rank, which imports this module too, a second

    without_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
    params = [
        pytest.param(w, id=str(w), marks=without_mpi if w.controller == "mpi" else ())
        for w in worlds
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True)
