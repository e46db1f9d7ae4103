"""Which implementation serves CUDA tensors, as far as that can be seen without a device."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvd_sparse.ops import _dispatch, reference
from hvd_sparse.ops.cuda import AddressTable, CompileError, CudaOps, CupyLauncher, _launcher

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _dispatch._on_cuda.cache_clear()
    _dispatch._warn_of_reference.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.delenv("HVD_SPARSE_NATIVE", raising=False)
    yield
    _dispatch._on_cuda.cache_clear()
    _dispatch._warn_of_reference.cache_clear()


class FakeCupy(ModuleType):
    """What `CupyLauncher` uses of CuPy, and of the driver; kernels of one file do not compile."""

    def __init__(self, broken: str = "") -> None:
        super().__init__("cupy")
        self.launches: list[tuple[object, ...]] = []
        self.options: list[tuple[str, ...]] = []
        compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))

        def device(index: int | None = None) -> object:
            context = nullcontext()
            context.compute_capability = "90"  # type: ignore[attr-defined]
            return context

        class RawModule:
            def __init__(self, code: str, options: tuple[str, ...], backend: str) -> None:
                self.code = code
                told.append(options)

            def get_function(self, name: str) -> object:
                if broken and f'#line 1 "{broken}"' in self.code:
                    raise compiler.CompileException("expected a ;")
                return SimpleNamespace(kernel=SimpleNamespace(ptr=name))

        told = self.options
        self.RawModule = RawModule
        nvrtc = SimpleNamespace(getVersion=lambda: (13, 0))
        driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {}))
        self.cuda = SimpleNamespace(Device=device, compiler=compiler, nvrtc=nvrtc, driver=driver)

    def start(self, name: str, *call: Any) -> int:
        """As CUDA's driver starts a kernel; a grid that is too large is its error 1."""
        *sizes, stream, none, extra = call
        assert none is None
        ours = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        self.launches.append((name, *sizes, stream, ours))
        return int(sizes[0] >= 2**31)


@pytest.mark.usefixtures("torch_for_cuda")
def test_without_cupy_a_warning_names_the_extra_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.warns(UserWarning, match=r"pip install 'hvd-sparse\[cuda13\]'"):
        assert _dispatch.on(DEVICE) is reference
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _dispatch.on(torch.device("cuda", 1)) is reference
        assert _dispatch.backend(DEVICE) == "reference"


@pytest.mark.usefixtures("torch_for_cuda")
def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_SPARSE_NATIVE", "0")
    assert _dispatch.on(DEVICE) is reference


@pytest.mark.usefixtures("torch_for_cuda")
def test_with_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, FakeCupy())
    assert isinstance(_dispatch.on(DEVICE), CudaOps)
    assert _dispatch.backend(DEVICE) == "cuda"


@pytest.mark.usefixtures("torch_for_cuda")
def test_an_old_device_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    with pytest.warns(UserWarning, match="sm_61 is older than sm_70"):
        assert _dispatch.on(DEVICE) is reference


def test_without_a_compiler_the_first_bucket_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    del cupy.cuda.nvrtc
    with pytest.raises(CompileError, match=r"CuPy cannot compile kernels for cuda:0: .*nvrtc"):
        launcher(monkeypatch, cupy)


def test_a_home_that_cannot_be_written_costs_the_cache_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    launcher(monkeypatch, FakeCupy()).launch("scatter_add", 1)
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir()


def fake(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    calls = dict.fromkeys(
        ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"), lambda *call: 0
    )
    driver = SimpleNamespace(cuLaunchKernel=cupy.start, **calls)
    monkeypatch.setattr(_launcher, "_driver", lambda: driver)


def launcher(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> CupyLauncher:
    fake(monkeypatch, cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return CupyLauncher(DEVICE)


def test_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    kernels = launcher(monkeypatch, cupy)
    x = torch.zeros(3)
    rows = torch.zeros(5, dtype=torch.int64)
    kernels.launch("scatter_add", 0, x)
    given = (x, AddressTable(rows, []), None, np.int32(5), np.float32(0.5), np.uint64(2**40))
    kernels.launch("scatter_add", 2, *given)
    ((name, *sizes, stream, arguments),) = cupy.launches
    assert (name, sizes, stream) == ("scatter_add", [2, 1, 1, 256, 1, 1, 0], 7)
    addresses = (x.data_ptr(), rows.data_ptr(), 0)
    assert arguments == struct.pack("<QQQifQ", *addresses, 5, 0.5, 2**40)
    assert cupy.options == [("-std=c++17",)]


def test_a_scalar_lies_where_the_kernel_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    launcher(monkeypatch, cupy).launch("scatter_add", 1, np.int32(5), None, np.uint32(6))
    assert cupy.launches[0][-1] == struct.pack("<i4xQI", 5, 0, 6)


def test_a_scalar_without_a_type_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="dtype"):
        launcher(monkeypatch, FakeCupy()).launch("scatter_add", 1, 5)  # type: ignore[arg-type]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="1"):
        launcher(monkeypatch, FakeCupy()).launch("scatter_add", 2**31)


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, asked = FakeCupy(), []
    fake(monkeypatch, kernels)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", asked.append)
    with pytest.raises(AttributeError):  # it asked, and got no stream
        CupyLauncher(torch.device("cuda")).launch("scatter_add", 1)
    assert asked == [torch.device("cuda", 3)]


def test_an_error_names_kernel_and_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = launcher(monkeypatch, FakeCupy(broken="topk.cu"))
    kernels.launch("scatter_add", 1)
    with pytest.raises(CompileError, match=r"count_digits \(topk.cu\) .* sm_90: expected a ;"):
        kernels.launch("count_digits", 1)
