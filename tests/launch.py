"""Starts programs under `horovodrun`, and never leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

Controller = Literal["gloo", "mpi", "torchrun"]
"""Of Horovod's ranks the first two; `torchrun` starts ranks without Horovod."""

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
LAUNCH_VARIABLE = "HVD_SPARSE_TEST_LAUNCH"
HOROVODRUN = (sys.executable, "-m", "tests.launcher")
"""Needs `launch_environment`."""

BUILT_VARIABLE = "HVD_SPARSE_TEST_BUILT"
"""Holds what Horovod was built with, for `tests.launcher`."""

ABORT_S = 1.0
"""What a process that hangs may take to write its threads' stacks."""

GLOO_TIMEOUT_S = 120
"""What Horovod's own messages may take. Its ranks spin while they wait, and where there are fewer
cores than ranks, its default of 30 s can pass before the thread that holds a lock runs again."""


class LaunchError(AssertionError):
    """A launch ended in a way that the test did not ask for; carries both of its outputs."""


class Launch:
    """A command in a session of its own, whose processes all end with it.

    Used as a context manager: leaving it kills what is left.

    Attributes:
        mark: What all its processes have in their environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.command = list(command)
        self.mark = uuid.uuid4().hex
        # A file each, not pipes: a survivor that holds a pipe open would make the reader wait.
        self._files = [tempfile.TemporaryFile() for _ in ("out", "err")]  # noqa: SIM115
        self._texts: list[str] | None = None
        self.process = subprocess.Popen(
            self.command,
            env={"PYTHONFAULTHANDLER": "1", **env, LAUNCH_VARIABLE: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def outputs(self) -> list[str]:
        """Standard output and standard error so far."""
        if self._texts is not None:
            return self._texts
        # The launch writes where these files' offset is: it must not be moved.
        read = (os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0) for f in self._files)
        return [text.decode(errors="replace") for text in read]

    def error(self, what: str) -> LaunchError:
        """An error that says what was run, what happened, and both outputs."""
        out, err = self.outputs()
        return LaunchError(
            f"{' '.join(self.command)}\n{what}\n--- stdout ---\n{out}\n--- stderr ---\n{err}"
        )

    def abort(self) -> None:
        """Ends what hangs, workers first; each Python process writes where its threads are."""
        everyone = self._processes()
        workers = [other for other in everyone if not _has_children(other)]
        for others in (workers, everyone):
            for other in others:
                with suppress(psutil.Error):
                    other.send_signal(signal.SIGABRT)
            psutil.wait_procs(others, ABORT_S)

    def kill(self) -> None:
        """Kills the launch's group, and every process that has inherited its mark.

        horovodrun and mpirun put workers into sessions of their own, out of the group's reach.
        """
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for other in self._processes():
            with suppress(psutil.Error):
                other.kill()
        self._texts = self.outputs()
        for file in self._files:
            file.close()

    def _processes(self) -> list[psutil.Process]:
        """All that have inherited its mark."""
        found = []
        for other in psutil.process_iter():
            with suppress(psutil.Error):
                if other.environ().get(LAUNCH_VARIABLE) == self.mark:
                    found.append(other)
        return found


def _has_children(process: psutil.Process) -> bool:
    try:
        return bool(process.children())
    except psutil.Error:
        return False


def horovodrun(
    np: int,
    script: str | os.PathLike[str] | Callable[..., Any],
    *args: object,
    controller: Controller = "gloo",
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    check: bool = True,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs `horovodrun -np NP … python SCRIPT ARGS…` and waits for it.

    A launch takes seconds. Tests that need nothing but ranks share them: see `tests.ranks`.

    Args:
        np: number of ranks.
        script: a function, which each rank calls between `hvd.init` and `hvd.shutdown`; or a file,
            looked up in `tests` if its path is relative.
        *args: arguments of the script; a function gets them as strings.
        controller: `gloo` or `mpi`.
        hosts: Horovod's `-H`; by default as many slots on this host as there are ranks.
        env: variables added to the environment of the launch.
        timeout: seconds until the launch, with everything it started, is killed.
        check: whether an exit status other than 0 is an error.
        prefix: a command to run `horovodrun` under, as `["ip", "netns", "exec", "x"]`.
        options: further options of `horovodrun`.

    Raises:
        LaunchError: The launch timed out, or failed while `check` is set. The message holds both
            outputs, the standard output first.
    """
    command = launch_command(
        np, script, *args, controller=controller, hosts=hosts, prefix=prefix, options=options
    )
    return run_in_group(command, env=launch_environment(env), timeout=timeout, check=check)


def python_command(script: str | os.PathLike[str] | Callable[..., Any], *args: object) -> list[str]:
    """The command line that runs a script, or a function as `tests/call.py` does."""
    if callable(script):
        name = f"{script.__module__}:{script.__qualname__}"
        command = [sys.executable, "-m", "tests.call", name]
    else:
        command = [sys.executable, str(TESTS / script)]
    return command + [str(argument) for argument in args]


def launch_command(
    np: int,
    script: str | os.PathLike[str] | Callable[..., Any],
    *args: object,
    controller: Controller = "gloo",
    hosts: str | None = None,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """The command line that `horovodrun` above runs, or `torchrun` with the same arguments."""
    if controller == "torchrun":
        start = [*prefix, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*start, f"--nproc-per-node={np}", *options, *python_command(script, *args)[1:]]
    command = [*prefix, *HOROVODRUN, f"--{controller}"]
    command += ["-np", str(np), "-H", hosts or f"localhost:{np}", *options]
    if controller == "gloo":
        command += ["--gloo-timeout-seconds", str(GLOO_TIMEOUT_S)]
    else:
        command.append("--mpi-args=--oversubscribe --allow-run-as-root")
    return command + python_command(script, *args)


def launch_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with the repository importable and one thread per rank."""
    environment = dict(os.environ)
    paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Ranks that wait for MPI give way to those that work, where there are fewer cores than ranks.
    environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment[BUILT_VARIABLE] = built()
    environment.update(extra or {})
    return environment


@cache
def built() -> str:
    """What Horovod was built with."""
    import horovod.torch as hvd

    return " ".join(["gloo"] * hvd.gloo_built() + ["mpi"] * hvd.mpi_built())


def run_in_group(
    command: Sequence[str], *, env: Mapping[str, str], timeout: float, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a session of its own, and kills whatever it started in the end.

    Raises:
        LaunchError: It timed out, or failed while `check` is set.
    """
    with Launch(command, env) as launch:
        try:
            status = launch.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            launch.abort()
            raise launch.error(f"did not end in {timeout:g} s") from None
        launch.kill()
        if check and status != 0:
            raise launch.error(f"ended {status}")
        return subprocess.CompletedProcess(launch.command, status, *launch.outputs())
