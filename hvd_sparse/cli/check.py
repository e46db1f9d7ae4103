"""`hvd-sparse check`: what is installed, what would be chosen and why, and whether a step works."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from hvd_sparse import ops
from hvd_sparse._version import __version__
from hvd_sparse.cli.command import Command, Output
from hvd_sparse.cli.tuned import missing
from hvd_sparse.compression import POLICY_VARIABLE
from hvd_sparse.errors import HvdSparseError, one_line
from hvd_sparse.ops._dispatch import command_for_cupy
from hvd_sparse.ops.cuda import CudaOps
from hvd_sparse.ops.native import ISA_NAMES, LIBRARY_PATH
from hvd_sparse.planner.remembered import default_path
from hvd_sparse.policy import load_policy
from hvd_sparse.policy.document import suggestion
from hvd_sparse.tables import table
from hvd_sparse.transports.connect import TRANSPORT_NAMES, VARIABLE
from hvd_sparse.transports.meeting import OWN_VARIABLE, describe_host
from hvd_sparse.transports.nccl import problem_with_nccl

CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
SLOW_SETTINGS = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD")
OURS = ("BIND", "IFACE", "ISA", "NATIVE", "POLICY", "TORCH", "TRANSPORT")
VALUES = {"BIND": ("0", "1"), "NATIVE": ("0", "1"), "ISA": ISA_NAMES}
TRIAL_S = 90
TRIAL = f"""
import signal; signal.alarm({TRIAL_S})  # ends a rank that nobody waits for any more
import horovod.torch as hvd, hvd_sparse, torch
hvd.init()
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.device_count() > 1 else "cpu"
model = torch.nn.Linear(64, 64).to(device)
compression = hvd_sparse.Compression.topk(model.named_parameters(), timeout_s={TRIAL_S / 2})
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression)
model(torch.ones(1, 64, device=device)).sum().backward()
optimizer.step()
print(f"[{{hvd.rank()}}] went by {{compression.stats().transport}};", flush=True)
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        state: "ok"; "none", where something optional is missing; or "problem".
        detail: Version, place or reason.
    """

    name: str
    state: str
    detail: str


def versions() -> Finding:
    """The versions of this package, torch and Python."""
    return Finding(
        "versions",
        "ok",
        f"hvd_sparse {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    )


def horovod() -> Finding:
    """Whether Horovod's torch module loads, and which controllers it was built with."""
    version = _version("horovod")
    if version is None:
        return Finding("horovod", "problem", "not installed: only DDP trains without it")
    try:
        hvd: Any = importlib.import_module("horovod.torch")
    except Exception as error:  # a build for another torch fails in many ways
        return Finding("horovod", "problem", f"{version} does not load: {one_line(error)}")
    built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
    return Finding("horovod", "ok", f"{version}, built with {', '.join(built) or 'nothing'}")


def native_library() -> Finding:
    """The implementation of operations on CPU tensors."""
    backend = ops.backend()
    if backend != "reference":
        return Finding("native library", "ok", f"{backend}: {LIBRARY_PATH}")
    if os.environ.get("HVD_SPARSE_NATIVE") == "0":
        return Finding("native library", "none", "switched off by HVD_SPARSE_NATIVE=0: slow")
    why = f"{LIBRARY_PATH} {'does not load' if LIBRARY_PATH.exists() else 'is missing'}"
    mend = "build it (pip install .), or start outside of the sources where it is installed"
    return Finding("native library", "problem", f"{why}: slow torch reference; {mend}")


def gloo() -> Finding:
    """Whether torch has the backend that the gloo transport uses."""
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return Finding("transport gloo", "ok", "torch.distributed has it")
    return Finding("transport gloo", "problem", "this torch was built without gloo")


def mpi(horovod_finding: Finding) -> Finding:
    """Whether the MPI transport can be used under `horovodrun --mpi`.

    mpi4py is not imported, because outside an MPI job that would start a world of one rank.
    """
    if horovod_finding.state == "ok" and "mpi" not in horovod_finding.detail:
        return Finding("transport mpi", "none", "Horovod was built without MPI")
    version = _version("mpi4py")
    if version is None:
        return Finding("transport mpi", "none", "mpi4py is not installed (pip install mpi4py)")
    if shutil.which("mpirun") is None:
        return Finding("transport mpi", "none", f"mpi4py {version}, but there is no mpirun")
    return Finding("transport mpi", "ok", f"mpi4py {version}")


def nccl() -> Finding:
    """Whether the NCCL transport can be used where each rank has its own device."""
    problem = problem_with_nccl()
    if problem is not None:
        return Finding("transport nccl", "none", problem)
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    return Finding("transport nccl", "ok", f"NCCL {version}, {torch.cuda.device_count()} devices")


def cuda() -> Finding:
    """Whether a GPU is present, and CuPy for its kernels, of which one is compiled and run."""
    if not torch.cuda.is_available():
        return Finding("CUDA", "none", "torch sees no CUDA device")
    device = torch.cuda.get_device_name()
    found = [f"{name} {v}" for name in CUPY_DISTRIBUTIONS if (v := _version(name)) is not None]
    if not found:
        mend = command_for_cupy()
        return Finding("CUDA", "problem", f"{device}, but no CuPy for its kernels: slow; {mend}")
    try:
        place = torch.device("cuda", torch.cuda.current_device())
        values = torch.arange(8, dtype=torch.float32, device=place)
        kernels = ops.on(place)
        runs = isinstance(kernels, CudaOps) and kernels.kth_magnitude(values, 2) == 6
    except Exception as error:  # of a compiler, a driver or a cache
        return Finding("CUDA", "problem", f"{device}, {found[0]}: {one_line(error)}")
    state = "ok" if runs else "problem"
    return Finding("CUDA", state, f"{device}, {found[0]}, a kernel compiled and run")


def cache_folder() -> Finding:
    """Whether the planner can keep its plans for the next run."""
    path = default_path()
    if path is None:
        return Finding("cache", "problem", "no home folder for plans: set XDG_CACHE_HOME")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return Finding("cache", "ok", f"{path.parent} can be written")
    except OSError as error:
        why = f"{path.parent} cannot be written ({error.strerror})"
        return Finding("cache", "problem", f"{why}: set XDG_CACHE_HOME, or a policy's plan_cache")


def settings() -> list[Finding]:
    """Environment variables that change a choice, or that make every step slow."""
    found = []
    for name in sorted(os.environ):
        if name == POLICY_VARIABLE:
            found += [policy(os.environ[name])] if os.environ[name] else []
        elif name.startswith("HVD_SPARSE_"):
            found.append(setting(name, os.environ[name]))
    for name in SLOW_SETTINGS:
        if os.environ.get(name) == "0":
            found.append(Finding(name, "problem", "0 makes every step slow: unset it"))
    if os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        found.append(Finding("HOROVOD_AUTOTUNE", "problem", "tunes on small tensors: unset it"))
    if unset := missing():
        told = f"{', '.join(unset)} not set: `hvd-sparse tuned horovodrun …` sets what is quicker"
        found.append(Finding("launch", "none", told))
    return found


def setting(name: str, value: str) -> Finding:
    """Whether there is such a variable and such a value, and the interface that it names."""
    if name not in (known := [f"HVD_SPARSE_{each}" for each in OURS]):
        return Finding(name, "problem", f"unknown: {suggestion(name, known)}")
    valid = VALUES.get(name.removeprefix("HVD_SPARSE_"), (value,))
    if value and value not in valid:
        return Finding(name, "problem", f"{value} is none of {', '.join(valid)}: unset it")
    if name == OWN_VARIABLE and value:
        usable = [each.name for each in describe_host().interfaces if not each.is_loopback]
        if value not in usable:
            can = ", ".join(usable) or "none"
            return Finding(name, "problem", f"{value} is no usable interface; usable: {can}")
    return Finding(name, "ok", value)


def policy(path: str) -> Finding:
    """Whether the policy named in the environment is valid."""
    try:
        rules = len(load_policy(path).rules)
    except (HvdSparseError, OSError) as error:
        return Finding(POLICY_VARIABLE, "problem", str(error))
    return Finding(POLICY_VARIABLE, "ok", f"{path}: valid, {rules} rules")


def chosen_transport(of_transports: list[Finding]) -> Finding:
    """The choice of `transport="auto"` here, and why; the last finding is MPI's."""
    asked = os.environ.get(VARIABLE)
    name = "transport auto"
    if asked and asked != "auto":
        if asked not in TRANSPORT_NAMES:
            names = ", ".join(TRANSPORT_NAMES)
            return Finding(name, "problem", f"{VARIABLE} must be one of {names}; got {asked!r}")
        here = next((f for f in of_transports if f.name == f"transport {asked}"), None)
        if here is not None and here.state != "ok":
            mend = f"mend that, or unset {VARIABLE}"
            return Finding(name, "problem", f"{VARIABLE}={asked}, but {here.detail}: {mend}")
        return Finding(name, "ok", f"{asked}, because {VARIABLE} says so")
    mpi_finding = of_transports[-1]
    if mpi_finding.state == "ok":
        choice = "mpi under horovodrun --mpi, gloo under horovodrun --gloo"
    else:
        choice = f"gloo, because {mpi_finding.detail}"
    return Finding(name, "ok", choice)


def trial_step() -> Finding:
    """A training step of two ranks of this machine, as `horovodrun` starts them."""
    name, ranks = "a training step", 2
    beside = Path(sys.executable).with_name("horovodrun")
    launcher = str(beside) if beside.exists() else shutil.which("horovodrun")
    if launcher is None:
        return Finding(name, "problem", "there is no horovodrun: install Horovod")
    command = [launcher, "-np", str(ranks), sys.executable, "-c", TRIAL]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as launch:
        try:
            told, _ = launch.communicate(timeout=TRIAL_S)
        except BaseException as error:  # Ctrl-C, too
            os.killpg(launch.pid, signal.SIGTERM)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Finding(name, "problem", f"{ranks} ranks did not end within {TRIAL_S} s")
    if launch.returncode == 0:
        by = told.rpartition("went by ")[2].partition(";")[0]
        return Finding(name, "ok", f"{ranks} ranks of this machine{f', by {by}' * bool(by)}")
    said = re.sub(r"\[\d+,\d+\]<std\w+>: ?", "", told)  # a launcher's mark of rank and stream
    errors = re.findall(r"^[\w.]+Error: .*", said, re.MULTILINE)
    why = errors[0] if errors else f"horovodrun ended with {launch.returncode}"
    return Finding(name, "problem", f"{why}; see `{' '.join(command[:-1])} …`")


def findings(*, with_trial: bool = True) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_horovod = horovod()
        transports = [gloo(), nccl(), mpi(of_horovod)]
        found = [versions(), of_horovod, native_library(), *transports, cuda(), cache_folder()]
        found += [*settings(), chosen_transport(transports)]
    if with_trial and not any(each.state == "problem" for each in (of_horovod, found[-1])):
        found.append(trial_step())
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="without the step of two ranks")


def run(options: argparse.Namespace) -> Output:
    """Check everything; the status is 1 where there is a problem."""
    found = findings(with_trial=not options.quick)
    problems = [finding for finding in found if finding.state == "problem"]
    marks = {"ok": "ok", "none": "--", "problem": "!!"}
    lines = [table([(marks[f.state], f.name, f.detail) for f in found])]
    lines += ["", f"{len(problems)} problem{'s' * (len(problems) != 1)}"] if problems else []
    report = {"findings": [asdict(finding) for finding in found], "problems": len(problems)}
    return Output(report, "\n".join(lines), status=1 if problems else 0)


def _version(distribution: str) -> str | None:
    """The installed version; None where the module cannot be found either."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version" if util.find_spec(distribution.replace("-", "_")) else None


CHECK = Command(
    name="check",
    summary="show what is installed, what would be chosen and why, and try a step",
    examples=("hvd-sparse check", "HVD_SPARSE_TRANSPORT=mpi hvd-sparse check --quick --json"),
    add_arguments=add_arguments,
    run=run,
)
