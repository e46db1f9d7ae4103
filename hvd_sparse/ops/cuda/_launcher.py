"""Kernels, launched on torch's current stream through CuPy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hvd_sparse.ops.cuda import _sources

THREADS = 256
"""Of a block, for every kernel (`kThreads` in csrc/cuda/common.cuh)."""


@dataclass(frozen=True)
class AddressTable:
    """Rows of integers on the device, each of which begins with the address of another tensor.

    Attributes:
        rows: int64, contiguous, on the device.
        tensors: What the addresses refer to, row by row; fewer where a row has none.
    """

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
    """Kernels on one device, compiled when they are first used.

    Args:
        device: The device.
        options: What the compiler is told beside the language.

    Raises:
        ImportError: CuPy is not installed.
    """

    def __init__(self, device: torch.device, options: Sequence[str] = ()) -> None:
        import cupy

        self._cupy: Any = cupy
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
        with self._compiling:
            if family not in self._modules:
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
