from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from tests.ranks import Ranks
from tools.netlab import Netlab, Network
from tools.netlab import missing as missing_for_netlab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a device, and CuPy for its kernels; `netlab`, network namespaces."""
    skip(items, "gpu", missing_for_gpu())
    if any(item.get_closest_marker("netlab") for item in items):
        skip(items, "netlab", missing_for_netlab())


def skip(items: list[pytest.Item], marker: str, missing: str) -> None:
    """Skip what has a marker, where something is missing."""
    for item in items:
        if missing and item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=missing))


def missing_for_gpu() -> str:
    return (
        "no CUDA device"
        if not torch.cuda.is_available()
        else "CuPy is not installed"
        if find_spec("cupy") is None
        else ""
    )


@pytest.fixture(scope="session")
def netlab() -> Iterator[Network]:
    """Four hosts, as fast as they are."""
    with Netlab(hosts=4) as network:
        yield network


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of a world, which `tests.ranks.with_ranks` names."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.kill()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks leave after the last test of their world: even idle ones take time of the others."""
    ours, next_ones = (world_of(i) for i in (item, nextitem))
    if ours is not None and ours != next_ones:
        item.funcargs["ranks"].close()


def world_of(item: pytest.Item | None) -> object:
    return item.callspec.params.get("ranks") if hasattr(item, "callspec") else None
