"""Every kernel compiles for the architectures that CUDA 12 and 13 both know."""

from __future__ import annotations

import ctypes
import re
import shutil
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from hvd_sparse.ops.cuda import _sources
from tools.gpu_lease.compiled import build, disassembled, instructions_of, stacks_of

ARCHITECTURES = (75, 80, 90, 100, 120)
FLAGS = ("-std=c++17", "-ftz=true")
"""As CuPy gives them."""
MOST_REGISTERS = {"hashing": 85, "groups": 96}
"""Of families whose kernels leave room for 3 blocks only, or 2."""
ELEMENTS_OF_THREAD, MOST_INSTRUCTIONS = 16, 200
"""For each element, of all ways through a kernel together: three types, wide and narrow, with edges
and without. A tile takes one of them."""
ADDRESSES = r"((IMAD|IADD|LEA|MOV|VIADD|LDC|UMOV|ULEA|UIADD|R2UR|CS2R|HFMA2)\S* ){0,3}"
"""Between loads: instructions for addresses and constants, which wait for none of them."""
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


@cache
def compiled(family: str, architecture: int) -> bytes:
    """The machine code of a file of kernels."""
    return Nvrtc().compile(f"{family}.cu", _sources.source(family), architecture)


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_library() is None, reason="no NVRTC wheel (nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("family", FAMILIES)
def test_nvrtc(family: str, tmp_path: Path) -> None:
    """No register is spilt to memory, which would cost more than the kernels' own traffic."""
    kernels = {kernel for kernel, of in _sources.kernels().items() if of == family}
    for architecture in ARCHITECTURES:
        code = compiled(family, architecture)
        cubin = tmp_path / f"{architecture}.cubin"
        cubin.write_bytes(code)
        stacks = stacks_of(cubin)
        if stacks is None:  # no cuobjdump
            assert all(kernel.encode() in code for kernel in kernels)
        else:
            assert stacks == dict.fromkeys(kernels, 0), f"sm_{architecture}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("family", FAMILIES)
def test_nvcc(family: str, tmp_path: Path) -> None:
    """No register is spilt to memory, which would cost more than the kernels' own traffic."""
    _, resources = build(family, 90, tmp_path)
    assert resources.keys() == {kernel for kernel, of in _sources.kernels().items() if of == family}
    assert {kernel: used.spilt for kernel, used in resources.items() if used.spilt} == {}
    most = MOST_REGISTERS.get(family, 64)  # of 65,536, for 4 blocks of 256 threads
    assert {kernel for kernel, used in resources.items() if used.registers > most} == set()


@pytest.mark.slow
@pytest.mark.skipif(nvrtc_library() is None, reason="no NVRTC wheel (nvidia-cuda-nvrtc)")
@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_a_wide_tile_is_loaded_back_to_back(architecture: int, tmp_path: Path) -> None:
    """Four loads of 16 bytes of the residual and of float32 gradients, of 8 of 16-bit ones."""
    cubin = tmp_path / "accumulate.cubin"
    cubin.write_bytes(compiled("accumulate", architecture))
    sass = disassembled(cubin)
    if sass is None:
        pytest.skip("no cuobjdump")
    for kernel, vectors in {"accumulate_select": 1, "accumulate_momentum_select": 2}.items():
        instructions = instructions_of(sass, kernel)
        assert len(instructions) <= MOST_INSTRUCTIONS * ELEMENTS_OF_THREAD
        words = " ".join(instructions)
        assert re.search(rf"(LDG\.E\.128 {ADDRESSES}){{{4 * vectors}}}", words)
        # Gradients pass by the L1 cache.
        assert re.search(rf"(LDG\.E\.NA\.128\.CONSTANT {ADDRESSES}){{4}}", words)
        assert re.search(rf"(LDG\.E\.NA\.64\.CONSTANT {ADDRESSES}){{4}}", words)


def test_the_sources_include_nothing_of_cuda() -> None:
    for family in FAMILIES:
        includes = [
            line for line in _sources.source(family).splitlines() if line.startswith("#include")
        ]
        assert includes == ['#include "shim.h"']
