"""Starts a worker script under the unmodified `horovodrun`, and never leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import psutil

Controller = Literal["gloo", "mpi"]

REPOSITORY = Path(__file__).resolve().parents[1]
WORKERS = REPOSITORY / "tests" / "workers"
LAUNCH_VARIABLE = "HVD_SPARSE_TEST_LAUNCH"

GLOO_TIMEOUT_S = 120
"""What Horovod's own messages may take. Its ranks spin while they wait, and where there are fewer
cores than ranks, its default of 30 s can pass before the thread that holds a lock runs again."""


class LaunchError(AssertionError):
    """A launch ended in a way that the test did not ask for; carries both of its outputs."""


def horovodrun(
    np: int,
    script: str | os.PathLike[str],
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

    Args:
        np: number of ranks.
        script: the worker; a relative name is looked up in `tests/workers`.
        *args: arguments of the script.
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


def launch_command(
    np: int,
    script: str | os.PathLike[str],
    *args: object,
    controller: Controller = "gloo",
    hosts: str | None = None,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[str]:
    """The command line that `horovodrun` above runs."""
    path = Path(script)
    command = [*prefix, str(Path(sys.executable).parent / "horovodrun"), f"--{controller}"]
    command += ["-np", str(np), "-H", hosts or f"localhost:{np}", *options]
    if controller == "gloo":
        command += ["--gloo-timeout-seconds", str(GLOO_TIMEOUT_S)]
    else:
        command.append("--mpi-args=--oversubscribe --allow-run-as-root")
    command += [sys.executable, str(path if path.is_absolute() else WORKERS / path)]
    return command + [str(argument) for argument in args]


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
    environment.update(extra or {})
    return environment


def run_in_group(
    command: Sequence[str], *, env: Mapping[str, str], timeout: float, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a session of its own, and kills whatever it started in the end.

    Raises:
        LaunchError: It timed out, or failed while `check` is set.
    """
    launch_id = uuid.uuid4().hex
    # A file each, not pipes: a survivor that holds a pipe open would make the reader wait.
    with tempfile.TemporaryFile() as out_file, tempfile.TemporaryFile() as err_file:
        process = subprocess.Popen(
            list(command),
            env={**env, LAUNCH_VARIABLE: launch_id},
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_launch(process, launch_id)
        out, err = (_text_of(file) for file in (out_file, err_file))
    if timed_out or (check and process.returncode != 0):
        ending = f"did not end in {timeout:g} s" if timed_out else f"ended {process.returncode}"
        raise LaunchError(
            f"{' '.join(command)}\n{ending}\n--- stdout ---\n{out}\n--- stderr ---\n{err}"
        )
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _kill_launch(process: subprocess.Popen[bytes], launch_id: str) -> None:
    """Kills the launch's group, and every process that has inherited its mark.

    horovodrun and mpirun put workers into sessions of their own, out of the group's reach.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for other in psutil.process_iter():
        try:
            if other.environ().get(LAUNCH_VARIABLE) == launch_id:
                other.kill()
        except psutil.Error:
            continue
