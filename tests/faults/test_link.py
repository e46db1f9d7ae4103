"""The cable between two hosts is pulled in the middle of a training."""

from __future__ import annotations

import re
import time
from pathlib import Path
from threading import Thread

import pytest

from tests.launch import horovodrun
from tests.workers.fault_link import CUT_FOR_S, TIMEOUT_S, train
from tools.netlab import Network

pytestmark = [
    pytest.mark.netlab,
    pytest.mark.launches,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

HOSTS = "nl1:1,nl2:1"


def cut_when(file: Path, network: Network, mend_after_s: float | None) -> Thread:
    """Cut the second host off once the file is there."""

    def cut() -> None:
        while not file.exists():
            time.sleep(0.02)
        network.cut("nl2")
        if mend_after_s is not None:
            time.sleep(mend_after_s)
            network.mend("nl2")

    thread = Thread(target=cut, daemon=True)
    thread.start()
    return thread


def test_a_link_that_is_mended_in_time_costs_nothing(netlab: Network, tmp_path: Path) -> None:
    thread = cut_when(tmp_path / "cut", netlab, CUT_FOR_S)
    try:
        done = horovodrun(
            2, train, tmp_path / "cut", hosts=HOSTS, prefix=netlab.on("nl1"), timeout=200
        )
    finally:
        thread.join(2 * CUT_FOR_S)
        netlab.mend("nl2")
    balanced = re.findall(r"BALANCED, the longest step took ([\d.]+) s", done.stdout)
    assert len(balanced) == 2, done.stdout
    assert all(float(s) > CUT_FOR_S / 2 for s in balanced), balanced  # else nothing was cut


def test_a_link_that_stays_cut_ends_both_ranks(netlab: Network, tmp_path: Path) -> None:
    thread = cut_when(tmp_path / "cut", netlab, None)
    try:
        done = horovodrun(
            2,
            train,
            tmp_path / "cut",
            hosts=HOSTS,
            prefix=netlab.on("nl1"),
            timeout=200,
            check=False,
        )
    finally:
        thread.join(1.0)
        netlab.mend("nl2")
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    failed = dict(re.findall(r"\[(\d)\]<stdout>:.*?FAILED after [\d.]+ s: (.*)", output))
    assert re.search(r"rank 1 did not answer within|lost the connection to rank 1", failed["0"])
    seconds = [float(s) for s in re.findall(r"FAILED after ([\d.]+) s", output)]
    assert max(seconds) < TIMEOUT_S + 10.0, seconds
