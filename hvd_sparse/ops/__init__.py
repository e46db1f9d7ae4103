"""One function per kernel: a torch reference, and C++ for CPU tensors.

Streams are pairs of `indices`, int32 `(nnz,)` strictly ascending, and `values`, float32 `(nnz,)`.
Magnitudes are compared as integers, `bits(x) & 0x7fffffff`: NaN > inf > finite, and zeros of either
sign are never selected. Arguments are checked here, once; the order of a stream's indices is a
precondition.

CPU tensors go to the native library, and tensors of other devices to the torch reference. Without
the library, or with `HVD_SPARSE_NATIVE=0` in the environment, the reference does everything, with
the same results.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_sparse.ops import _checks as checks
from hvd_sparse.ops import reference
from hvd_sparse.ops._interface import Ops
from hvd_sparse.ops.native import NativeOps

__all__ = [
    "accumulate_select",
    "accumulate_topk",
    "backend",
    "decode",
    "difference",
    "kth_magnitude",
    "merge_sum",
    "scatter_add",
    "threshold_stream",
]


def _load() -> NativeOps | None:
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


_native = _load()


def backend() -> str:
    """Which implementation serves CPU tensors.

    Returns:
        `"native-avx512"`, `"native-avx2"`, `"native-portable"` or `"reference"`.
    """
    return "reference" if _native is None else f"native-{_native.isa}"


def accumulate_select(
    residual: Tensor, gradients: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Adds gradients to the residual and moves out what reaches a threshold, in one pass.

    An entry that becomes non-finite is moved out too, while the residual keeps what it held before
    (0 if that was not finite either): the residual is finite afterwards.

    Args:
        residual: float32 `(n,)`, changed in place: the sum, and zero where an entry moved out.
        gradients: Contiguous float32, float16 or bfloat16 tensors of any shape, laid side by side
            over the residual; none at all if there is nothing to add.
        threshold: Least magnitude to move out, >= 0. Zeros stay at any threshold, non-finite
            values at none (NaN stands for infinity here).

    Returns:
        `(indices, values)`, a stream `(nnz,)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, or
            the threshold is negative.
    """
    device = checks.vector("residual", residual).device
    checks.gradients(gradients, residual.numel(), device)
    checks.threshold_key(threshold)
    return _on(device).accumulate_select(residual, gradients, threshold)


def accumulate_topk(
    residual: Tensor, gradients: Sequence[Tensor], k: int, pivot: float = 0.0
) -> tuple[Tensor, Tensor, float]:
    """Adds gradients to the residual and moves out the k largest magnitudes, exactly.

    Takes the time of one pass where `pivot` lies somewhat below the k-th magnitude, so that it lets
    a little more than k entries pass: 0.9 times the last step's threshold, say.

    Args:
        residual: As for `accumulate_select`; entries that become non-finite are the largest.
        gradients: As for `accumulate_select`.
        k: How many entries to move out, >= 0; fewer move if fewer are nonzero. Of equal magnitudes
            the lower indices move.
        pivot: A guess at a magnitude somewhat below the k-th. 0.0 is no guess; a bad one costs
            time and changes nothing.

    Returns:
        `(indices, values, threshold)`: a stream, and the k-th largest magnitude (0.0 with fewer
        than k nonzeros, inf for k = 0).

    Raises:
        TypeError: A tensor has another dtype, or `k` is not an int.
        ValueError: A tensor is not contiguous or on another device, the numels do not add up, or
            `k` is negative.
    """
    device = checks.vector("residual", residual).device
    checks.gradients(gradients, residual.numel(), device)
    checks.integer("k", k, 0)
    return _on(device).accumulate_topk(residual, gradients, k, pivot)


def kth_magnitude(x: Tensor, k: int) -> float:
    """The k-th largest magnitude.

    Args:
        x: float32 `(n,)`.
        k: Rank in `[1, n]`.

    Raises:
        TypeError: `x` has another dtype, or `k` is not an int.
        ValueError: `x` is not contiguous, or `k` is out of its range.
    """
    device = checks.vector("x", x).device
    checks.integer("k", k, 1, x.numel())
    return _on(device).kth_magnitude(x, k)


def merge_sum(streams: Sequence[tuple[Tensor, Tensor]], numel: int) -> tuple[Tensor, Tensor]:
    """The sum of streams; at one index, values are added in the order of the list.

    Args:
        streams: Pairs `(indices, values)`, at least one.
        numel: Length of the vectors that the streams stand for, below 2**31.

    Returns:
        `(indices, values)`, one entry per index that occurs.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: There is no stream, lengths do not match, a tensor is not contiguous or on
            another device, or an index is found out of `[0, numel)`.
    """
    if len(streams) == 0:
        raise ValueError("streams must have at least one stream, got none")
    checks.integer("numel", numel, 0, checks.MAX_NUMEL)
    device = checks.device_of(streams[0][0])
    for i, (indices, values) in enumerate(streams):
        checks.stream(indices, values, device, f"streams[{i}]")
    return _on(device).merge_sum(streams, numel)


def difference(indices: Tensor, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of a stream whose index is not in `other`.

    Args:
        indices: The stream's, `(nnz,)`.
        values: The stream's, `(nnz,)`.
        other: int32 `(m,)`, strictly ascending.

    Returns:
        `(indices, values)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Lengths do not match, or a tensor is not contiguous or on another device.
    """
    device = checks.device_of(indices)
    checks.stream(indices, values, device)
    checks.tensor("other", other, (torch.int32,), device)
    return _on(device).difference(indices, values, other)


def threshold_stream(indices: Tensor, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The entries of a stream that reach a threshold, as `accumulate_select` understands it.

    Args:
        indices: The stream's, `(nnz,)`.
        values: The stream's, `(nnz,)`.
        threshold: Least magnitude to keep, >= 0.

    Returns:
        `(indices, values)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Lengths do not match, a tensor is not contiguous or on another device, or the
            threshold is negative.
    """
    device = checks.device_of(indices)
    checks.stream(indices, values, device)
    checks.threshold_key(threshold)
    return _on(device).threshold_stream(indices, values, threshold)


def scatter_add(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Adds a stream to a vector: `x[indices] += values`.

    Args:
        x: float32 `(n,)`, changed in place.
        indices: The stream's, `(nnz,)`.
        values: The stream's, `(nnz,)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Lengths do not match, a tensor is not contiguous or on another device, or an
            index is out of `[0, n)` (some entries may have been added then).
    """
    device = checks.vector("x", x).device
    checks.stream(indices, values, device)
    _on(device).scatter_add(x, indices, values)


def decode(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Writes a stream as a dense vector: zero everywhere but `out[indices] = values`.

    Args:
        out: float32, float16 or bfloat16 `(n,)`, overwritten; values are rounded to nearest even.
        indices: The stream's, `(nnz,)`.
        values: The stream's, `(nnz,)`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Lengths do not match, a tensor is not contiguous or on another device, or an
            index is found out of `[0, n)` (`out` is undefined then).
    """
    device = checks.device_of(out)
    checks.tensor("out", out, checks.GRADIENT_DTYPES, device)
    checks.stream(indices, values, device)
    _on(device).decode(out, indices, values)


def _on(device: torch.device) -> Ops:
    """The implementation for tensors on `device`."""
    return _native if _native is not None and device.type == "cpu" else reference
