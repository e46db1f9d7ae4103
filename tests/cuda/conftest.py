from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvd_sparse.ops.cuda import CudaOps, _workspace
from tests.cuda.shim_launcher import FAMILIES, Shim

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
