from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from hvd_sparse.ops.native import ISA_NAMES, NativeOps
from tests.ops.on_device import OnDevice

LIBRARIES = list(product(ISA_NAMES, (1, 3)))
ON_CUDA = [pytest.param(("cuda", 0), marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


def name_of(isa_and_threads: tuple[str, int]) -> str:
    return "-".join(map(str, isa_and_threads))


@pytest.fixture(scope="module", params=LIBRARIES, ids=name_of)
def library(request: pytest.FixtureRequest) -> Iterator[NativeOps]:
    """The library on each instruction set that this processor has, on 1 and 3 threads."""
    with switched_to(*request.param) as ops:
        yield ops


@pytest.fixture(scope="module", params=[*LIBRARIES, *ON_CUDA], ids=name_of)
def native(request: pytest.FixtureRequest) -> Iterator[NativeOps | OnDevice]:
    """The same, and CUDA."""
    isa, threads = request.param
    if isa == "cuda":
        yield OnDevice(torch.device("cuda", torch.cuda.current_device()))
        return
    with switched_to(isa, threads) as ops:
        yield ops


@contextmanager
def switched_to(isa: str, threads: int) -> Iterator[NativeOps]:
    """The library on an instruction set; the test is skipped where the processor lacks it."""
    ops = NativeOps(threads=threads)
    before = ops.isa
    try:
        ops.set_isa(isa)
    except ValueError:
        pytest.skip(f"this processor has no {isa}")
    yield ops
    ops.set_isa(before)
