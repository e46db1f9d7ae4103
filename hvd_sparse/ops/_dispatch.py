"""Which implementation serves a tensor."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hvd_sparse.ops import reference
from hvd_sparse.ops._arguments import Entries
from hvd_sparse.ops.accumulation import Accumulation
from hvd_sparse.ops.cuda import CudaOps, CupyLauncher
from hvd_sparse.ops.native import NativeOps


class Ops(Protocol):
    """What each implementation has; `hvd_sparse.ops` documents it and checks the arguments."""

    def accumulate_select(self, accumulation: Accumulation, threshold: float) -> Entries: ...

    def accumulate_topk(
        self, accumulation: Accumulation, k: int, pivot: float = 0.0
    ) -> tuple[Tensor, Tensor, float]: ...

    def accumulate_group_topk(
        self, accumulation: Accumulation, k: int, group_numel: int = 512
    ) -> Entries: ...

    def partition_select(
        self, accumulation: Accumulation, threshold: float, start: int, stop: int
    ) -> Entries: ...

    def hash_select(
        self,
        accumulation: Accumulation,
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        seed: int,
    ) -> Entries: ...

    def kth_magnitude(self, x: Tensor, k: int) -> float: ...

    def sample_accumulator(
        self, accumulation: Accumulation, runs: int, run_numel: int, seed: int
    ) -> Tensor: ...

    def merge_sum(self, streams: Sequence[Entries], numel: int) -> Entries: ...

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> Entries: ...

    def unapplied(self, sent: Entries, lost: Entries, applied: Tensor) -> Entries: ...

    def threshold_stream(self, indices: Tensor, values: Tensor, threshold: float) -> Entries: ...

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None: ...

    def take_at(self, x: Tensor, indices: Tensor) -> Tensor: ...

    def zero_at(self, x: Tensor, indices: Tensor) -> None: ...

    def gap_encode(self, indices: Tensor, start: int) -> Tensor: ...

    def gap_decode(self, code: Tensor, nnz: int, start: int, stop: int) -> Tensor: ...

    def qsgd_quantize(
        self, x: Tensor, bits: int, bucket_numel: int, seed: int
    ) -> tuple[Tensor, Tensor]: ...

    def qsgd_dequantize(
        self, codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
    ) -> Tensor: ...


def load() -> NativeOps | None:
    """The native library, or None where it is missing (with a warning) or switched off."""
    if os.environ.get("HVD_SPARSE_NATIVE") == "0":
        return None
    try:
        return NativeOps()
    except OSError as error:
        warnings.warn(
            f"hvd_sparse runs on its slow torch reference: no native library ({error}); "
            "build it (pip install .), or start outside of the sources where it is installed",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


_native = load()
_making = threading.Lock()


def backend(device: torch.device | str = "cpu") -> str:
    """Which implementation serves tensors on a device.

    Args:
        device: With its index, as a tensor's is: `"cpu"`, `"cuda:0"`.

    Returns:
        `"native-avx512"`, `"native-avx2"`, `"native-portable"`, `"cuda"` or `"reference"`.
    """
    serving = unchecked(torch.device(device))
    if isinstance(serving, NativeOps):
        return f"native-{serving.isa}"
    return "reference" if serving is reference else "cuda"


def unchecked(device: torch.device) -> Ops:
    """The operations for tensors on a device, without the checks of their arguments.

    For streams that this package made or read from a checked message: everything else goes through
    the functions of `hvd_sparse.ops`. A tensor of another type would be read as what it is not.
    """
    if _native is not None and device.type == "cpu":
        return _native
    if device.type == "cuda" and os.environ.get("HVD_SPARSE_NATIVE") != "0":
        with _making:
            return _on_cuda(device.index)
    return reference


@cache
def _on_cuda(index: int) -> Ops:
    """The kernels for one device, or the reference where they cannot be had, with a warning."""
    release: str | None = vars(torch.version).get("cuda")
    if release is None:  # a build for another maker's devices
        _warn_of_reference("the CUDA kernels need a torch for CUDA")
        return reference
    capability = torch.cuda.get_device_capability(index)
    if capability < (7, 0):
        _warn_of_reference("sm_{}{} is older than sm_70".format(*capability))
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
