"""`hvd-sparse check`: what is installed, and what would be chosen and why."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Any

import torch
import torch.distributed

from hvd_sparse import ops
from hvd_sparse._version import __version__
from hvd_sparse.cli.command import Command, Output, no_arguments, one_line
from hvd_sparse.compression import POLICY_VARIABLE
from hvd_sparse.errors import HvdSparseError
from hvd_sparse.ops.native import LIBRARY_PATH
from hvd_sparse.policy import load_policy
from hvd_sparse.tables import table
from hvd_sparse.transports.connect import TRANSPORT_NAMES, VARIABLE
from hvd_sparse.transports.nccl import problem_with_nccl

CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
SLOW_SETTINGS = ("HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD")


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
        return Finding("horovod", "problem", "not installed: nothing can be exchanged without it")
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
    return Finding("native library", "problem", f"{LIBRARY_PATH} does not load: slow reference")


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
        return Finding("CUDA", "none", f"{device}, but CuPy is not installed")
    try:
        ops.kth_magnitude(torch.ones(2, device="cuda"), 1)
    except Exception as error:
        return Finding("CUDA", "problem", f"{device}, {found[0]}: {error}")
    return Finding("CUDA", "ok", f"{device}, {found[0]}, a kernel ran")


def settings() -> list[Finding]:
    """Environment variables that change a choice, or that make every step slow."""
    found = []
    for name in sorted(os.environ):
        if name == POLICY_VARIABLE:
            found.append(policy(os.environ[name]))
        elif name.startswith("HVD_SPARSE_"):
            found.append(Finding(name, "ok", os.environ[name]))
    for name in SLOW_SETTINGS:
        if os.environ.get(name) == "0":
            found.append(Finding(name, "problem", "0 makes every step slow: unset it"))
    if os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        found.append(Finding("HOROVOD_AUTOTUNE", "problem", "tunes on small tensors: unset it"))
    return found


def policy(path: str) -> Finding:
    """Whether the policy named in the environment is valid."""
    try:
        rules = len(load_policy(path).rules)
    except (HvdSparseError, OSError) as error:
        return Finding(POLICY_VARIABLE, "problem", str(error))
    return Finding(POLICY_VARIABLE, "ok", f"{path}: valid, {rules} rules")


def chosen_transport(mpi_finding: Finding) -> Finding:
    """The choice of `transport="auto"` here, and why."""
    asked = os.environ.get(VARIABLE)
    name = "transport auto"
    if asked and asked != "auto":
        if asked not in TRANSPORT_NAMES:
            names = ", ".join(TRANSPORT_NAMES)
            return Finding(name, "problem", f"{VARIABLE} must be one of {names}; got {asked!r}")
        return Finding(name, "ok", f"{asked}, because {VARIABLE} says so")
    if mpi_finding.state == "ok":
        choice = "mpi under horovodrun --mpi, gloo under horovodrun --gloo"
    else:
        choice = f"gloo, because {mpi_finding.detail}"
    return Finding(name, "ok", choice)


def findings() -> list[Finding]:
    """All findings, in the order in which they are shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_horovod = horovod()
        of_mpi = mpi(of_horovod)
        return [
            *(versions(), of_horovod, native_library(), gloo(), nccl(), of_mpi, cuda()),
            *settings(),
            chosen_transport(of_mpi),
        ]


def run(options: argparse.Namespace) -> Output:
    """Check everything; the status is 1 where there is a problem."""
    found = findings()
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
    summary="show what is installed, and what would be chosen and why",
    examples=("hvd-sparse check", "HVD_SPARSE_TRANSPORT=mpi hvd-sparse check --json"),
    add_arguments=no_arguments,
    run=run,
)
