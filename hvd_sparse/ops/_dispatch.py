"""Which implementation serves a tensor."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import cast

import torch

from hvd_sparse.errors import warn
from hvd_sparse.ops import reference
from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from hvd_sparse.ops.native import NativeOps

Ops = NativeOps | CudaOps
"""What each implementation has; `hvd_sparse.ops` documents it and checks the arguments."""
REFERENCE = cast("NativeOps", reference)
"""The module has the same functions: tests/ops and tests/cuda hold all three to each other."""


def load() -> NativeOps | None:
    """The native library, or None where it is missing (with a warning) or switched off."""
    if os.environ.get("HVD_SPARSE_NATIVE") == "0":
        return None
    try:
        return NativeOps()
    except OSError as error:
        warn(
            f"runs on its slow torch reference: no native library ({error}); build it (pip "
            "install .), or start outside of the sources where it is installed"
        )
        return None


_native = load()
_making = threading.Lock()


def backend(device: torch.device | str = "cpu") -> str:
    """Which implementation serves tensors on a device, which has its index: `"cuda:0"`.

    Returns `"native-avx512"`, `"native-avx2"`, `"native-portable"`, `"cuda"` or `"reference"`.
    """
    serving = on(torch.device(device))
    if serving is REFERENCE:
        return "reference"
    return f"native-{serving.isa}" if isinstance(serving, NativeOps) else "cuda"


def on(device: torch.device) -> Ops:
    """The operations for tensors on a device, which has its index; nothing checks their types.

    A tensor of another type or length is read as what it is not: only streams that this package
    made, or read from a checked message, come here. For the others there is `hvd_sparse.ops`.
    """
    if _native is not None and device.type == "cpu":
        return _native
    if device.type == "cuda" and os.environ.get("HVD_SPARSE_NATIVE") != "0":
        with _making:
            return _on_cuda(device.index)
    return REFERENCE


def on_host() -> NativeOps:
    """The operations that the CPU alone has: of wires and of hosts.

    They check no dtypes and sizes: only `wire/` and `hosts/` call them. Indices or a code that was
    damaged raise ValueError. `reference.py` describes them.
    """
    return _native or REFERENCE


@cache
def _on_cuda(index: int) -> Ops:
    """The kernels for one device, or the reference where they cannot be had, with a warning."""
    release: str | None = vars(torch.version).get("cuda")
    if release is None:  # a build for another maker's devices
        _warn_of_reference("the CUDA kernels need a torch for CUDA")
        return REFERENCE
    capability = torch.cuda.get_device_capability(index)
    if capability < (7, 0):
        _warn_of_reference("sm_{}{} is older than sm_70".format(*capability))
        return REFERENCE
    try:
        return CudaOps(CupyLauncher(torch.device("cuda", index)))
    except ImportError as error:
        _warn_of_reference(f"no CuPy, which `{command_for_cupy()}` brings ({error})")
        return REFERENCE


def command_for_cupy() -> str:
    """What installs the CuPy that fits this torch; there is no extra for CUDA 11."""
    major = str(torch.version.cuda).partition(".")[0]
    wanted = "cupy-cuda11x" if major == "11" else f"'hvd-sparse[cuda{major}]'"
    return f"pip install {wanted}"


@cache
def _warn_of_reference(reason: str) -> None:
    """Warns once of each reason."""
    warn(f"runs on its slow torch reference for CUDA tensors: {reason}")
