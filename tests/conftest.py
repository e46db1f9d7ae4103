from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a device, and CuPy for its kernels."""
    missing = (
        "no CUDA device"
        if not torch.cuda.is_available()
        else "CuPy is not installed"
        if find_spec("cupy") is None
        else None
    )
    if missing is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))
