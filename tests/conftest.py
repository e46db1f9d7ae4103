"""What holds for all tests: which are slow, which run beside which, and the ranks they share."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from tests.ranks import Ranks, World
from tools.netlab import Netlab, Network
from tools.netlab import missing as missing_for_netlab

LARGEST_QUICK_WORLD = 2
"""Sweeps over more ranks that are threads are slow together, if not one by one."""

QUICK_RANKS = World(2)
"""The one launch of ranks that is not slow."""

LAUNCHING = re.compile(
    r"^from tests\.(ranks import|launch import .*(horovodrun|run_in_group|launch_command))",
    re.MULTILINE,
)
"""What files import whose tests have ranks. Such files had better hold nothing else."""
LOOSE = {"benchmarks", "cli", "ddp", "docs", "examples", "tests"}
"""Folders whose ranks run beside those of others: nothing there is timed closely."""

SLOW_S = 10.0
"""About what a test must take to be marked as slow."""

FAR_TOO_SLOW_S = 3 * SLOW_S
"""Of this process's own time, which does not count that of other programs: no test may take so much
without the mark."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run; marks as slow what follows from a test's parameters."""
    skip(items, "gpu", missing_for_gpu())
    if any(item.get_closest_marker("netlab") for item in items):
        skip(items, "netlab", missing_for_netlab())
    for item in items:
        parameters = parameters_of(item)
        ranks, launches = parameters.get("ranks"), item.get_closest_marker("launches") is not None
        if (
            launches
            or ranks not in (None, QUICK_RANKS)
            or parameters.get("world_size", parameters.get("P", 0)) > LARGEST_QUICK_WORLD
        ):
            item.add_marker(pytest.mark.slow)


def skip(items: list[pytest.Item], marker: str, missing: str) -> None:
    """Skip what has a marker, where something is missing."""
    for item in items:
        if missing and item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=missing))


def missing_for_gpu() -> str:
    """Why tests marked `gpu` cannot run, or an empty string."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "CuPy is not installed" if find_spec("cupy") is None else ""


@pytest.fixture(scope="session")
def netlab() -> Iterator[Network]:
    """Four hosts, as fast as they are."""
    with Netlab(hosts=4) as network:
        yield network


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of the tests that `-n 3` runs side by side, those of one group run one after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(config.rootpath / nodeid.partition("::")[0])

    return Groups(config, log)


def group_of(file: Path) -> str:
    """A group for each file, but two for those that have ranks, and one for what builds kernels."""
    if LAUNCHING.search(file.read_text()):
        return "loose ranks" if file.parent.name in LOOSE else "ranks"
    return "cuda" if file.parent.name == "cuda" else str(file)


def parameters_of(item: pytest.Item | None) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(scope="session", autouse=True)
def torch_on_one_thread() -> Iterator[None]:
    """Ranks are threads already, and references have nothing to gain from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def caches_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a planner remembers of a test is not for its user, nor for the next test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of a world, which `tests.ranks.with_ranks` names."""
    ranks = Ranks(request.param)
    yield ranks
    ranks.kill()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks leave after the last test of their world: even idle ones take time of the others."""
    ours, next_ones = (parameters_of(i).get("ranks") for i in (item, nextitem))
    held = item.funcargs.get("ranks")  # none where the test was skipped
    if ours is not None and ours != next_ones and held is not None:
        held.close()


@pytest.fixture(autouse=True)
def launches_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes seconds: a test shares its ranks with others, or says that it is slow."""

    def refuse(*arguments: object, **options: object) -> None:
        pytest.fail("a test that launches ranks has the mark `launches`; most can take `ranks`")

    if request.node.get_closest_marker("launches") is None:
        monkeypatch.setattr(launch, "run_in_group", refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before_s = time.process_time()
    yield
    spent_s = time.process_time() - before_s
    if spent_s > FAR_TOO_SLOW_S and item.get_closest_marker("slow") is None:
        pytest.fail(f"took {spent_s:.0f} s of a core without the mark `slow`")
