from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from hvd_sparse.ops.native import ISA_NAMES, NativeOps
from tests.ops.on_device import OnDevice


@pytest.fixture(
    scope="module",
    params=[
        *product(ISA_NAMES, (1, 3)),
        *([pytest.param(("cuda", 0), marks=pytest.mark.gpu)] if torch.cuda.is_available() else []),
    ],
    ids=lambda isa_and_threads: "-".join(map(str, isa_and_threads)),
)
def native(request: pytest.FixtureRequest) -> Iterator[NativeOps | OnDevice]:
    """The library on each instruction set that this processor has, on 1 and 3 threads; and CUDA."""
    isa, threads = request.param
    if isa == "cuda":
        yield OnDevice(torch.device("cuda", torch.cuda.current_device()))
        return
    ops = NativeOps(threads=threads)
    before = ops.isa
    try:
        ops.set_isa(isa)
    except ValueError:
        pytest.skip(f"this processor has no {isa}")
    yield ops
    ops.set_isa(before)
