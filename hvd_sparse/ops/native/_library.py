"""The C++ library, `hvd_sparse/_native.so`, and what all families of its functions need."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_int32
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.ops._checks import bad_index

LIBRARY_PATH = Path(__file__).resolve().parents[2] / "_native.so"
ISA_NAMES = ("portable", "avx2", "avx512")

Signatures = Mapping[str, tuple[type, ...]]
"""Arguments of a family's C functions, without their prefix `hvds_`; each returns a status."""

_ABI_VERSION = 7
_OK, _BAD_INDEX, _BAD_ARGUMENT = 0, 2, 3


class NativeLibrary:
    """The library, loaded; a family of operations is a subclass that names its functions.

    Args:
        path: The library.
        threads: Most threads that a call uses; None: what torch uses (`torch.get_num_threads()`) at
            the time of the call.

    Raises:
        OSError: There is no such library, or it was built from another version of the sources.
    """

    signatures: ClassVar[Signatures] = {"abi_version": (), "isa": (), "set_isa": (c_int32,)}

    def __init__(self, path: Path = LIBRARY_PATH, threads: int | None = None) -> None:
        library = ctypes.CDLL(str(path))
        for family in type(self).__mro__:
            for name, arguments in vars(family).get("signatures", {}).items():
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


def empty_stream(nnz: int) -> tuple[Tensor, Tensor]:
    """Room for a stream of `nnz` entries."""
    return torch.empty(nnz, dtype=torch.int32), torch.empty(nnz, dtype=torch.float32)


def first(nnz: int, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The first `nnz` entries of a stream; all of them are the stream itself."""
    return (indices, values) if nnz == indices.numel() else (indices[:nnz], values[:nnz])


def check(status: int, what: str = "", numel: int = 0) -> None:
    """Turns a status into its exception; `what` are the indices that belong in `[0, numel)`."""
    if status == _OK:
        return
    if status == _BAD_INDEX:
        raise bad_index(what, numel)
    if status == _BAD_ARGUMENT:
        raise ValueError("the native library refused its arguments")
    raise MemoryError("the native library ran out of memory")
