"""Kernels, compiled by CuPy and launched on torch's current stream."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.errors import logger
from hvd_sparse.ops.cuda import _sources

LOCK = "hvd_sparse.lock"
THREADS = 256
"""Of a block, for every kernel (`kThreads` in csrc/cuda/common.cuh)."""


@dataclass(frozen=True)
class AddressTable:
    """Rows of int64 on the device, each of which begins with the address of one of the tensors."""

    rows: Tensor
    tensors: Sequence[Tensor]


Argument = Tensor | AddressTable | np.generic | None
"""A kernel's argument: memory, a scalar of exactly the parameter's type, or a null pointer."""


class Launcher(Protocol):
    """Starts kernels on one device."""

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        """Starts a kernel on `blocks` blocks of `THREADS` threads; none starts nothing."""


class CompileError(RuntimeError):
    """A kernel could not be compiled."""


class CupyLauncher:
    """Kernels on one device, compiled by CuPy when they are first used.

    The driver starts them, which takes the host a third of what CuPy takes. Python's lock is kept
    meanwhile, some microseconds as a rule: whoever lets it go waits for other threads.

    Raises:
        ImportError: CuPy is not installed.
        CompileError: It has no compiler, or no driver that fits.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy, self._cache = _cupy()
        self._context = ctypes.c_void_p()
        index: int | None = device.index  # torch's stubs know of no device without one
        index = torch.cuda.current_device() if index is None else index
        self._device = torch.device("cuda", index)
        try:
            with self._cupy.cuda.Device(index):
                self._cupy.cuda.nvrtc.getVersion()
            self._driver = _driver()
            self._check(self._driver.cuDevicePrimaryCtxRetain(self._context, index))
        except Exception as error:
            raise CompileError(f"CuPy cannot compile kernels for {device}: {error}") from error
        self._families = _sources.kernels()
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, tuple[int, struct.Struct, object]] = {}
        self._compiling = threading.Lock()

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        if blocks == 0:
            return
        function, layout, _ = self._functions.get(kernel) or self._compiled(kernel, arguments)
        size = ctypes.c_size_t(layout.size)
        packed = ctypes.create_string_buffer(layout.pack(*map(_as_number, arguments)), layout.size)
        where = ctypes.addressof(packed), ctypes.addressof(size)
        extra = (ctypes.c_void_p * 5)(1, where[0], 2, where[1], 0)  # buffer, its size, end
        stream = torch.cuda.current_stream(self._device).cuda_stream
        grid, block = (blocks, 1, 1), (THREADS, 1, 1)
        self._check(self._driver.cuCtxPushCurrent_v2(self._context))
        status = self._driver.cuLaunchKernel(function, *grid, *block, 0, stream, None, extra)
        self._driver.cuCtxPopCurrent_v2(ctypes.c_void_p())
        self._check(status)

    def _check(self, status: int) -> None:
        if status != 0:
            raise self._cupy.cuda.driver.CUDADriverError(status)

    def _compiled(
        self, kernel: str, arguments: Sequence[Argument]
    ) -> tuple[int, struct.Struct, object]:
        """A kernel's handle, how its arguments lie, and what keeps it loaded."""
        family = self._families[kernel]
        with self._compiling, (self._cache / LOCK).open("a") as lock:
            with suppress(OSError):  # some file systems have none
                fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes then find it compiled
            if family not in self._modules:
                logger.info("compiling the kernels of %s.cu", family)
                self._modules[family] = self._cupy.RawModule(
                    code=_sources.source(family), options=("-std=c++17",), backend="nvrtc"
                )
            try:
                with self._cupy.cuda.Device(self._device.index):
                    function = self._modules[family].get_function(kernel).kernel
            except self._cupy.cuda.compiler.CompileException as error:
                architecture = self._cupy.cuda.Device().compute_capability
                raise CompileError(
                    f"kernel {kernel} ({family}.cu) does not compile for sm_{architecture}: {error}"
                ) from error
            layout = struct.Struct("".join(map(_code_of, arguments)))
            return self._functions.setdefault(kernel, (function.ptr, layout, function))


def _driver() -> Any:
    """CUDA's, as far as launches need it."""
    driver = ctypes.PyDLL("libcuda.so.1")
    numbers, addresses = [ctypes.c_uint] * 7, [ctypes.c_void_p] * 3
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *numbers, *addresses]
    driver.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
    driver.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    return driver


def _cupy() -> tuple[Any, Path]:
    """CuPy, and the folder of what it has compiled: one of this process's own, if need be."""
    cache = Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / LOCK).touch()
    except OSError:
        cache = Path(tempfile.mkdtemp(prefix="hvd_sparse_"))
        os.environ["CUPY_CACHE_DIR"] = str(cache)
    import cupy

    return cupy, cache


def _code_of(argument: Argument) -> str:
    """What `struct` calls its type, which then lies where C has it."""
    if argument is None or isinstance(argument, Tensor | AddressTable):
        return "P"
    return argument.dtype.char


def _as_number(argument: Argument) -> Any:
    if argument is None:
        return 0
    if isinstance(argument, AddressTable):
        return argument.rows.data_ptr()
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
