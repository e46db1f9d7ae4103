"""Which implementation serves a tensor."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch

from hvd_sparse.ops import reference
from hvd_sparse.ops._interface import HostOps, Ops
from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from hvd_sparse.ops.native import NativeOps


def load() -> NativeOps | None:
    """The native library, or None where it is missing (with a warning) or switched off."""
    if os.environ.get("HVD_SPARSE_NATIVE") == "0":
        return None
    try:
        return NativeOps()
    except OSError as error:
        warnings.warn(
            f"hvd_sparse runs on its slow torch reference: no native library ({error})",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


_native = load()


def backend(device: torch.device | str = "cpu") -> str:
    """Which implementation serves tensors on a device.

    Args:
        device: With its index, as a tensor's is: `"cpu"`, `"cuda:0"`.

    Returns:
        `"native-avx512"`, `"native-avx2"`, `"native-portable"`, `"cuda"` or `"reference"`.
    """
    serving = implementation(torch.device(device))
    if isinstance(serving, NativeOps):
        return f"native-{serving.isa}"
    return "reference" if serving is reference else "cuda"


def implementation(device: torch.device) -> Ops:
    """The operations for tensors on `device`."""
    if _native is not None and device.type == "cpu":
        return _native
    if device.type == "cuda" and os.environ.get("HVD_SPARSE_NATIVE") != "0":
        return _on_cuda(device.index)
    return reference


def on_the_host() -> HostOps:
    """The operations that are for the host alone."""
    return reference if _native is None else _native


@cache
def _on_cuda(index: int) -> Ops:
    """The kernels for one device, or the reference where they cannot be had, with a warning."""
    release: str | None = vars(torch.version).get("cuda")
    if release is None:  # a build for another maker's devices
        _warn_of_reference("the CUDA kernels need a torch for CUDA")
        return reference
    try:
        return CudaOps(CupyLauncher(torch.device("cuda", index)))
    except ImportError as error:
        extra = f"hvd-sparse[cuda{release.partition('.')[0]}]"
        _warn_of_reference(f"no CuPy, which `pip install '{extra}'` brings ({error})")
        return reference


@cache
def _warn_of_reference(reason: str) -> None:
    """Warns once of each reason."""
    warnings.warn(
        f"hvd_sparse runs on its slow torch reference for CUDA tensors: {reason}",
        RuntimeWarning,
        stacklevel=5,
    )
