"""Tests that run on the CPU, and on a CUDA device where there is one.

Their names on the CPU are as if there were no devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

CPU = torch.device("cpu")
CUDA = [pytest.param(torch.device("cuda"), id="cuda", marks=pytest.mark.gpu)]
ON_CUDA = CUDA if torch.cuda.is_available() else []

on_every_device = pytest.mark.parametrize(
    "device", [pytest.param(CPU, id=pytest.HIDDEN_PARAM), *ON_CUDA]
)


def in_worlds(cpu: Sequence[object], cuda: Sequence[int] = (3,)) -> pytest.MarkDecorator:
    """World sizes on the CPU, which may have marks, and fewer of them on a CUDA device."""
    sizes = [size if isinstance(size, type(CUDA[0])) else pytest.param(size) for size in cpu]
    params = [
        pytest.param(size.values[0], CPU, id=str(size.values[0]), marks=size.marks)
        for size in sizes
    ]
    if ON_CUDA:
        params += [
            pytest.param(size, torch.device("cuda"), id=f"{size}-cuda", marks=pytest.mark.gpu)
            for size in cuda
        ]
    return pytest.mark.parametrize(("world_size", "device"), params)
