"""The operations on CPU tensors through the C++ library, `hvd_sparse/_native.so`.

The arguments are as `hvd_sparse.ops` has checked them. Calls release the GIL, and may come from
several threads at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from hvd_sparse.ops._checks import bad_index, pivot_key, threshold_key

LIBRARY_PATH = Path(__file__).resolve().parents[1] / "_native.so"
ISA_NAMES = ("portable", "avx2", "avx512")

_ABI_VERSION = 1
_OK, _BAD_INDEX, _BAD_ARGUMENT = 0, 2, 3
_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

# As in csrc/cpu/api.h; every function returns a status.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "abi_version": (),
    "isa": (),
    "set_isa": (c_int32,),
    "accumulate_select": (c_void_p, c_int64, c_void_p, c_int64, c_uint32, c_int32, c_void_p),
    "take": (c_void_p, c_void_p, c_int64, c_int32),
    "accumulate_topk": (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_uint32, c_int32)
    + (c_void_p,) * 4,
    "kth_magnitude": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
    "merge_sum": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p),
    "difference": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    "threshold_stream": (c_void_p, c_void_p, c_int64, c_uint32, c_void_p, c_void_p, c_void_p),
    "scatter_add": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32),
    "decode": (c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_int32),
}


class NativeOps:
    """The library's functions.

    Args:
        path: The library.
        threads: Most threads that a call uses; None: what torch uses (`torch.get_num_threads()`) at
            the time of the call.

    Raises:
        OSError: There is no such library, or it was built from another version of the sources.
    """

    def __init__(self, path: Path = LIBRARY_PATH, threads: int | None = None) -> None:
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"hvds_{name}", None)
            if function is None:
                raise OSError(f"{path} has no function hvds_{name}: build it again")
            function.argtypes = arguments
            function.restype = c_int32
        self._library = library
        self._threads = threads
        version = library.hvds_abi_version()
        if version != _ABI_VERSION:
            raise OSError(f"{path} has interface {version}, not {_ABI_VERSION}: build it again")

    @property
    def isa(self) -> str:
        """The instruction set in use: one of `ISA_NAMES`."""
        return ISA_NAMES[self._library.hvds_isa()]

    def set_isa(self, name: str) -> None:
        """Switches to another instruction set, for tests.

        Raises:
            ValueError: The processor does not have it, or there is none of that name.
        """
        code = ISA_NAMES.index(name) if name in ISA_NAMES else -1
        if self._library.hvds_set_isa(code) != _OK:
            raise ValueError(f"name must be an instruction set of this processor, got {name!r}")

    def _thread_count(self) -> int:
        return torch.get_num_threads() if self._threads is None else self._threads

    def accumulate_select(
        self, residual: Tensor, gradients: Sequence[Tensor], threshold: float
    ) -> tuple[Tensor, Tensor]:
        """Adds, and moves out what reaches the threshold."""
        threads = self._thread_count()
        nnz = c_int64()
        _check(
            self._library.hvds_accumulate_select(
                residual.data_ptr(),
                residual.numel(),
                *_segments(gradients),
                threshold_key(threshold),
                threads,
                byref(nnz),
            )
        )
        indices, values = _empty_stream(nnz.value)
        _check(self._library.hvds_take(indices.data_ptr(), values.data_ptr(), nnz.value, threads))
        return indices, values

    def accumulate_topk(
        self, residual: Tensor, gradients: Sequence[Tensor], k: int, pivot: float = 0.0
    ) -> tuple[Tensor, Tensor, float]:
        """Adds, and moves out the k largest magnitudes."""
        indices, values = _empty_stream(min(k, residual.numel()))
        nnz, threshold = c_int64(), c_float()
        _check(
            self._library.hvds_accumulate_topk(
                residual.data_ptr(),
                residual.numel(),
                *_segments(gradients),
                k,
                pivot_key(pivot),
                self._thread_count(),
                indices.data_ptr(),
                values.data_ptr(),
                byref(nnz),
                byref(threshold),
            )
        )
        return indices[: nnz.value], values[: nnz.value], threshold.value

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """The k-th largest magnitude."""
        magnitude = c_float()
        _check(
            self._library.hvds_kth_magnitude(
                x.data_ptr(), x.numel(), k, self._thread_count(), byref(magnitude)
            )
        )
        return magnitude.value

    def merge_sum(
        self, streams: Sequence[tuple[Tensor, Tensor]], numel: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of streams, in the order of the list."""
        table: list[int] = []
        room = 0
        for indices, values in streams:
            count = indices.numel()
            table += (indices.data_ptr(), values.data_ptr(), count)
            room += count
        out_indices, out_values = _empty_stream(room)
        nnz = c_int64()
        _check(
            self._library.hvds_merge_sum(
                (c_int64 * len(table))(*table),
                len(streams),
                numel,
                self._thread_count(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            ),
            "the indices of every stream",
            numel,
        )
        return out_indices[: nnz.value], out_values[: nnz.value]

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The entries whose index is not in `other`."""
        out_indices, out_values = _empty_stream(indices.numel())
        nnz = c_int64()
        _check(
            self._library.hvds_difference(
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                other.data_ptr(),
                other.numel(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return out_indices[: nnz.value], out_values[: nnz.value]

    def threshold_stream(
        self, indices: Tensor, values: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor]:
        """The entries that reach the threshold."""
        out_indices, out_values = _empty_stream(indices.numel())
        nnz = c_int64()
        _check(
            self._library.hvds_threshold_stream(
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                threshold_key(threshold),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return out_indices[: nnz.value], out_values[: nnz.value]

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None:
        """Adds a stream to a vector."""
        _check(
            self._library.hvds_scatter_add(
                x.data_ptr(),
                x.numel(),
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                self._thread_count(),
            ),
            "indices",
            x.numel(),
        )

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        """Writes a stream as a dense vector."""
        _check(
            self._library.hvds_decode(
                out.data_ptr(),
                _DTYPE_CODES[out.dtype],
                out.numel(),
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                self._thread_count(),
            ),
            "indices",
            out.numel(),
        )


def _segments(gradients: Sequence[Tensor]) -> tuple[ctypes.Array[c_int64], int]:
    """The table of (address, numel, dtype) triples, and how many there are."""
    table: list[int] = []
    for gradient in gradients:
        table += (gradient.data_ptr(), gradient.numel(), _DTYPE_CODES[gradient.dtype])
    return (c_int64 * len(table))(*table), len(gradients)


def _empty_stream(nnz: int) -> tuple[Tensor, Tensor]:
    return torch.empty(nnz, dtype=torch.int32), torch.empty(nnz, dtype=torch.float32)


def _check(status: int, what: str = "", numel: int = 0) -> None:
    """Turns a status into its exception."""
    if status == _OK:
        return
    if status == _BAD_INDEX:
        raise bad_index(what, numel)
    if status == _BAD_ARGUMENT:
        raise ValueError("the native library refused its arguments")
    raise MemoryError("the native library ran out of memory")
