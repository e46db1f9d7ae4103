"""Every kernel compiles for the architectures that CUDA 12 and 13 both know."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from hvd_sparse.ops.cuda import _sources

ARCHITECTURES = (80, 90, 100)
FLAGS = ("-std=c++17", "-ftz=true")
"""As CuPy gives them."""
FAMILIES = tuple(sorted(set(_sources.kernels().values())))


class Nvrtc:
    """The run-time compiler, which CuPy uses too, from NVIDIA's wheel."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(nvrtc_library()))

    def compile(self, name: str, source: str, architecture: int) -> bytes:
        """The machine code; what the compiler says ends the test."""
        program = ctypes.c_void_p()
        self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        )
        options = [option.encode() for option in (*FLAGS, f"-arch=sm_{architecture}")]
        status = self._library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = self._read(program, "ProgramLog").decode()
        assert status == 0, f"{name} for sm_{architecture}: {log}"
        return self._read(program, "CUBIN")

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, data)
        return data.raw


def nvrtc_library() -> Path | None:
    """The library of an installed wheel, whose name differs between CUDA's releases."""
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name.startswith("libnvrtc.so."):
                return Path(str(file.locate()))
    return None


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_library() is None, reason="no NVRTC wheel (nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("family", FAMILIES)
def test_nvrtc(family: str) -> None:
    kernels = [kernel for kernel, of in _sources.kernels().items() if of == family]
    for architecture in ARCHITECTURES:
        code = Nvrtc().compile(f"{family}.cu", _sources.source(family), architecture)
        assert all(kernel.encode() in code for kernel in kernels)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("family", FAMILIES)
def test_nvcc(family: str, tmp_path: Path) -> None:
    """No register is spilt to memory, which would cost more than the kernels' own traffic."""
    source = tmp_path / f"{family}.cu"
    source.write_text(_sources.source(family))
    command = ["nvcc", *FLAGS, "-arch=sm_90", "-Werror=all-warnings", "-Xptxas=-v", "-cubin"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spilt = [line for line in done.stderr.splitlines() if "bytes spill stores" in line]
    assert spilt
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spilt), done.stderr


def test_the_sources_include_nothing_of_cuda() -> None:
    for family in FAMILIES:
        includes = [
            line for line in _sources.source(family).splitlines() if line.startswith("#include")
        ]
        assert includes == ['#include "shim.h"']
