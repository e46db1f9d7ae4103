"""Which implementation serves a tensor."""

from __future__ import annotations

import os
import warnings

import torch

from hvd_sparse.ops import reference
from hvd_sparse.ops._interface import Ops
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


def backend() -> str:
    """Which implementation serves CPU tensors.

    Returns:
        `"native-avx512"`, `"native-avx2"`, `"native-portable"` or `"reference"`.
    """
    return "reference" if _native is None else f"native-{_native.isa}"


def implementation(device: torch.device) -> Ops:
    """The operations for tensors on `device`."""
    return _native if _native is not None and device.type == "cpu" else reference
