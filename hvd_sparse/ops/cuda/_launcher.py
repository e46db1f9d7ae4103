"""Kernels, launched on torch's current stream through CuPy."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

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
    """Kernels on one device, compiled when they are first used, with these options.

    Raises:
        ImportError: CuPy is not installed.
        CompileError: It has no compiler, or no driver that fits.
    """

    def __init__(self, device: torch.device, options: Sequence[str] = ()) -> None:
        self._cupy, self._cache = _cupy()
        try:
            with self._cupy.cuda.Device(device.index):
                self._cupy.cuda.nvrtc.getVersion()
        except Exception as error:
            raise CompileError(f"CuPy cannot compile kernels for {device}: {error}") from error
        self._device = device
        self._options = ("-std=c++17", *options)
        self._families = _sources.kernels()
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}
        self._compiling = threading.Lock()

    def launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        if blocks == 0:
            return
        stream = torch.cuda.current_stream(self._device)
        with self._cupy.cuda.Device(self._device.index), self._on(stream):
            function = self._functions.get(kernel) or self._compiled(kernel)
            function((blocks,), (THREADS,), tuple(map(_as_argument, arguments)))

    def _on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """CuPy's object for a stream, made once: torch's streams live as long as the process."""
        known: AbstractContextManager[Any] | None = self._streams.get(stream.cuda_stream)
        if known is None:
            known = self._streams[stream.cuda_stream] = self._foreign(stream)
        return known

    def _foreign(self, stream: torch.cuda.Stream) -> Any:
        streams = self._cupy.cuda
        if hasattr(streams.Stream, "from_external"):  # CuPy 14; ExternalStream goes away then
            return streams.Stream.from_external(_ForeignStream(stream))
        return streams.ExternalStream(stream.cuda_stream, self._device.index)

    def _compiled(self, kernel: str) -> Any:
        family = self._families[kernel]
        with self._compiling, (self._cache / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes then find it compiled
            if family not in self._modules:
                logging.getLogger("hvd_sparse").info("compiling the kernels of %s.cu", family)
                self._modules[family] = self._cupy.RawModule(
                    code=_sources.source(family), options=self._options, backend="nvrtc"
                )
            try:
                function = self._modules[family].get_function(kernel)
            except self._cupy.cuda.compiler.CompileException as error:
                architecture = self._cupy.cuda.Device().compute_capability
                raise CompileError(
                    f"kernel {kernel} ({family}.cu) does not compile for sm_{architecture}: {error}"
                ) from error
            self._functions[kernel] = function
            return function


def _cupy() -> tuple[Any, Path]:
    """CuPy, and the folder of what it has compiled: one that ends with this process, if need be."""
    cache = Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / LOCK).touch()
    except OSError:
        cache = Path(tempfile.mkdtemp(prefix="hvd_sparse_"))
        os.environ["CUPY_CACHE_DIR"] = str(cache)
    import cupy

    return cupy, cache


class _ForeignStream:
    """A stream of torch's by CUDA's stream protocol, which older releases of torch lack."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._stream.cuda_stream)


def _as_argument(argument: Argument) -> Any:
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, AddressTable):
        return np.uint64(argument.rows.data_ptr())
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    return argument
