"""The tests that need a device, several at a time; each failure is a row at once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_lease.results import Results

PLACES = ("ops", "cuda/test_merging.py", "selectors", "laws", "engine", "transports/test_nccl.py")
WITH_HOROVOD = ("cuda/test_shared_device.py", "adapter/test_fate.py")
JOBS = 12


def run(results: Results) -> None:
    """Run pytest with this module as a plugin."""
    jobs = ["-n", str(JOBS)] if find_spec("xdist") is not None else []
    places = [f"tests/{place}" for place in (*PLACES, *WITH_HOROVOD * bool(find_spec("horovod")))]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", *jobs]
    command += ["--continue-on-collection-errors", *places]
    plugin = ["-p", "tools.gpu_lease.suite", "--lease-rows", str(results.folder)]
    status = subprocess.run([*command, *plugin], check=False).returncode
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # those are rows
        results.row("pytest", ok=False, error=f"exit {status}")


# -- the plugin ------------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--lease-rows", type=Path, help="folder of a lease's rows")


def pytest_configure(config: Any) -> None:
    """Workers of xdist report to the first process, which alone writes."""
    if config.getoption("--lease-rows") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows(Results(config.getoption("--lease-rows"), "suite")))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file run side by side, too."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


class Rows:
    """Writes what fails, and how many passed."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._counts: Counter[str] = Counter()

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported is a row."""
        if report.failed:
            self._results.row(report.nodeid, ok=False, error=str(report.longrepr)[-1000:])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A failure is a row; the others are counted."""
        if report.when == "call" or report.outcome != "passed":
            self._counts[report.outcome] += 1
        if report.failed:
            self._results.row(report.nodeid, ok=False, error=str(report.longrepr)[-1000:])

    def pytest_sessionfinish(self) -> None:
        """The counts are a row, which fails where no test ran."""
        self._results.row("tests", dict(self._counts), ok=self._counts["passed"] > 0)
