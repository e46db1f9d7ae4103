from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from hvd_sparse.ops import _dispatch
from hvd_sparse.ops.cuda import CudaOps, _workspace
from tests.cuda.pretended import Event, Present, Pretended, Stream
from tests.cuda.shim_launcher import FAMILIES, Shim, ShimLauncher
from tests.devices import ON_CUDA

SEEDS = (0, pytest.param(1, marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def memory_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed words are allocations of their own, whose ends AddressSanitizer watches."""
    monkeypatch.setattr(_workspace, "BLOCK_WORDS", 0)


@pytest.fixture(scope="session")
def sanitized() -> Shim:
    return Shim(FAMILIES)


@pytest.fixture(scope="module", params=SEEDS, ids="seed {}".format)
def cuda(request: pytest.FixtureRequest, sanitized: Shim) -> Iterator[CudaOps]:
    """The operations for CUDA, on tensors on the CPU: kernels run under the sanitizers."""
    launcher = sanitized.launcher(request.param)
    yield CudaOps(launcher)
    launcher.close()


@pytest.fixture(params=["pretended", *ON_CUDA])
def one_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Pretended | Present]]:
    """Makes one thread's device: a pretended one, and the one that there is."""
    if request.param != "pretended":
        yield Present
        return
    monkeypatch.setattr(_dispatch, "_on_cuda", lambda index: Pretended.of_thread().ops)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    shim: Shim = request.getfixturevalue("sanitized")
    launchers: list[ShimLauncher] = []

    def make() -> Pretended:
        launchers.append(shim.launcher(0))
        return Pretended(launchers[-1])

    yield make
    for launcher in launchers:
        launcher.close()
