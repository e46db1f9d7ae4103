from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hvd_sparse.ops.cuda import CudaOps
from tests.cuda.shim_launcher import FAMILIES, Shim

SEEDS = (0, 1)


@pytest.fixture(scope="session", autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sanitized() -> Shim:
    return Shim(FAMILIES)


@pytest.fixture(scope="module", params=SEEDS, ids="seed {}".format)
def cuda(request: pytest.FixtureRequest, sanitized: Shim) -> Iterator[CudaOps]:
    """The operations for CUDA, on tensors on the CPU: kernels run under the sanitizers."""
    launcher = sanitized.launcher(request.param)
    yield CudaOps(launcher)
    launcher.close()
